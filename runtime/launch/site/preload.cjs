// Loaded by an agent's Node before its program (NODE_OPTIONS=--require). No dependencies.
//
// Node 20's own fetch and http/https ignore HTTP_PROXY and would go past the journal in silence. Here every connection
// that they open goes through a tunnel (CONNECT) of the sidecar; plain http goes inside one, too.
// * http and https: what an Agent opens connections by is replaced, in agents that libraries make for themselves too.
//   Not reached: agents with a createConnection of their own, net and tls, http2.
// * fetch, and the undici package when it is loaded: get a dispatcher that opens its connections so. One that a program
//   sets itself is left alone.
// Node 22.21 and 24.5 do all this by themselves (NODE_USE_ENV_PROXY=1).
// Under `twiceshy doctor` (TWICESHY_DOCTOR) it is written down which code connects to where.
'use strict';

if (process.env.TWICESHY_DOCTOR) {
  const { isIP, Socket } = require('net');
  const { connect } = Socket.prototype;
  Socket.prototype.connect = function (...given) {
    const first = Array.isArray(given[0]) ? given[0][0] : given[0];
    const options = typeof first === 'object' && first ? first : { port: first, host: given[1] };
    if (!options.path && Number(options.port)) {
      const name = typeof options.host === 'string' ? options.host : 'localhost';
      const { stackTraceLimit } = Error;
      Error.stackTraceLimit = 60;
      const { stack } = new Error();
      Error.stackTraceLimit = stackTraceLimit;
      const found = [...stack.matchAll(/[( ]((?:node:|file:|\/)[^()\n]*):(\d+):\d+\)?$/gm)].slice(1);
      const frames = found.map(([, file, line]) => [file.replace(/^file:\/\//, ''), Number(line)]);
      const told = (host) => {
        const line = { pid: process.pid, host, port: Number(options.port), name, frames };
        require('fs').appendFileSync(process.env.TWICESHY_DOCTOR, JSON.stringify(line) + '\n');
      };
      if (isIP(name)) told(name);
      else this.on('lookup', (error, host) => error || told(host));
    }
    return connect.apply(this, given);
  };
}

const proxy = process.env.HTTPS_PROXY || process.env.HTTP_PROXY;
const [major, minor] = process.versions.node.split('.').map(Number);
const native = major > 24 || (major === 24 && minor >= 5) || (major === 22 && minor >= 21);
if (proxy && process.env.TWICESHY_RUN && !native) {
  const { hostname, port, username, password } = new URL(proxy);
  const net = require('net');
  const tls = require('tls');
  const http = require('http');
  const https = require('https');
  const pair = `${decodeURIComponent(username)}:${decodeURIComponent(password)}`;
  const named = username && `Proxy-Authorization: Basic ${Buffer.from(pair).toString('base64')}\r\n`;
  const direct = new Set((process.env.NO_PROXY || '').split(',').map((name) => name.trim()).filter(Boolean));
  const isDirect = (host, at) => direct.has(host) || (host === hostname && String(at) === port);

  // Opens a tunnel to host:at, done(error, socket) once.
  const tunnel = (host, at, done) => {
    const authority = `${host.includes(':') ? `[${host}]` : host}:${at}`;
    const socket = net.connect({ host: hostname, port: Number(port), noDelay: true });
    let head = Buffer.alloc(0);
    const end = (error) => {
      socket.removeListener('data', read);
      socket.removeListener('error', end);
      socket.removeListener('close', closed);
      if (error) socket.destroy();
      done(error, error ? undefined : socket);
    };
    const closed = () => end(new Error('the sidecar closed the tunnel'));
    const read = (data) => {
      head = Buffer.concat([head, data]);
      const at = head.indexOf('\r\n\r\n');
      if (at < 0) return;
      const line = head.toString('latin1', 0, head.indexOf('\r\n'));
      socket.pause();
      if (head.length > at + 4) socket.unshift(head.subarray(at + 4));
      end(/^HTTP\/1\.[01] 200/.test(line) ? null : new Error(`the sidecar refused the tunnel: ${line}`));
    };
    socket.on('data', read);
    socket.on('error', end);
    socket.on('close', closed);
    socket.write(`CONNECT ${authority} HTTP/1.1\r\nHost: ${authority}\r\n${named}\r\n`);
  };

  let own; // who brings CAs of his own needs the sidecar's as well
  const secured = (options, socket, host) => {
    const given = { ...options, host, port: undefined, path: undefined, socket }; // host: whose certificate it must be
    given.servername = options.servername || (net.isIP(host) ? '' : host);
    if (options.ca && process.env.TWICESHY_CA_FILE) {
      own ??= require('fs').readFileSync(process.env.TWICESHY_CA_FILE);
      given.ca = [].concat(options.ca, own);
    }
    return tls.connect(given);
  };

  for (const [agent, secure] of [[http.Agent, false], [https.Agent, true]]) {
    const plain = agent.prototype.createConnection;
    agent.prototype.createConnection = function (options, done) {
      const host = options.host || options.hostname || 'localhost';
      const at = options.port || (secure ? 443 : 80);
      if (options.socketPath || isDirect(host, at) || typeof done !== 'function') {
        return plain.apply(this, arguments);
      }
      tunnel(host, at, (error, socket) => {
        if (error) return done(error);
        const made = secure ? secured(options, socket, host) : socket;
        if (options.keepAlive) socket.setKeepAlive(true, options.keepAliveInitialDelay);
        done(null, made);
        if (!secure) made.resume();
      });
      return undefined;
    };
  }

  if (typeof globalThis.fetch === 'function') {
    const key = Symbol.for('undici.globalDispatcher.1');
    const connect = (options, done) => {
      const secure = options.protocol === 'https:';
      const host = options.hostname.replace(/^\[|\]$/g, '');
      const at = options.port || (secure ? 443 : 80);
      const finish = (error, socket) => {
        if (error) return done(error);
        if (!secure) return done(null, socket);
        const servername = options.servername || undefined;
        const made = secured({ servername, ALPNProtocols: ['http/1.1'] }, socket, host);
        const failed = (why) => done(why);
        made.once('error', failed);
        made.once('secureConnect', () => {
          made.removeListener('error', failed);
          done(null, made);
        });
      };
      if (isDirect(host, at)) {
        const socket = net.connect({ host, port: Number(at), noDelay: true });
        socket.once('error', finish);
        socket.once('connect', () => {
          socket.removeListener('error', finish);
          finish(null, socket);
        });
      } else {
        tunnel(host, at, finish);
      }
    };
    let dispatcher;
    const install = () => {
      const found = globalThis[key];
      if (found !== dispatcher && found?.constructor?.name === 'Agent') {
        dispatcher = globalThis[key] = new found.constructor({ connect });
      }
    };
    const fetch = globalThis.fetch;
    let installed = false;
    globalThis.fetch = function (input, init) {
      if (!installed) {
        installed = true;
        void globalThis.Headers; // loads undici, which costs a program that never fetches nothing until here
        install();
      }
      return fetch(input, init);
    };

    const Module = require('module');
    const load = Module._load;
    let seen = false;
    Module._load = function (request) {
      const loaded = load.apply(this, arguments);
      if (!seen && /(^|[\\/])undici([\\/]index\.js)?$/.test(request)) {
        seen = true;
        install();
      }
      return loaded;
    };
  }
}
