// Loaded by an agent's Node before its program (NODE_OPTIONS=--require). No dependencies.
//
// Node 20's own fetch and http/https ignore HTTP_PROXY and would go past the journal in silence:
// * fetch is led to the sidecar's gateway address;
// * http and https get agents that open a tunnel by CONNECT (plain http inside a tunnel, too).
'use strict';

const proxy = process.env.HTTPS_PROXY || process.env.HTTP_PROXY;
if (proxy && process.env.TWICESHY_RUN) {
  const { hostname, port, username, password } = new URL(proxy);
  const net = require('net');
  const tls = require('tls');
  const http = require('http');
  const https = require('https');
  const credentials = Buffer.from(`${decodeURIComponent(username)}:${decodeURIComponent(password)}`).toString('base64');
  const direct = new Set((process.env.NO_PROXY || '').split(',').map((name) => name.trim()).filter(Boolean));
  const isDirect = (host, at) => direct.has(host) || (host === hostname && String(at) === port);

  const tunnel = (options, secure, done) => {
    const host = options.host || options.hostname || 'localhost';
    const at = options.port || (secure ? 443 : 80);
    if (isDirect(host, at)) {
      done(null, secure ? tls.connect(options) : net.connect(options));
      return;
    }
    const authority = `${host.includes(':') ? `[${host}]` : host}:${at}`;
    const socket = net.connect({ host: hostname, port: Number(port) });
    let head = Buffer.alloc(0);
    const fail = (error) => done(error || new Error('the sidecar closed the tunnel'));
    const read = (data) => {
      head = Buffer.concat([head, data]);
      const end = head.indexOf('\r\n\r\n');
      if (end < 0) return;
      socket.removeListener('data', read);
      socket.removeListener('error', fail);
      socket.removeListener('close', fail);
      socket.pause();
      const rest = head.subarray(end + 4);
      if (rest.length) socket.unshift(rest);
      if (!/^HTTP\/1\.[01] 200/.test(head.toString('latin1', 0, 16))) {
        fail(new Error(`the sidecar refused the tunnel: ${head.toString('latin1', 0, head.indexOf('\r\n'))}`));
        return;
      }
      if (!secure) {
        done(null, socket);
        socket.resume();
        return;
      }
      const servername = options.servername || (net.isIP(host) ? '' : host);
      done(null, tls.connect({ ...options, host: undefined, port: undefined, path: undefined, socket, servername }));
    };
    socket.on('data', read);
    socket.once('error', fail);
    socket.once('close', fail);
    socket.write(
      `CONNECT ${authority} HTTP/1.1\r\nHost: ${authority}\r\nProxy-Authorization: Basic ${credentials}\r\n\r\n`,
    );
  };

  const through = (base, secure) =>
    class extends base {
      createConnection(options, done) {
        tunnel(options, secure, done);
        return undefined;
      }
    };
  http.globalAgent = new (through(http.Agent, false))({ keepAlive: true, timeout: 0 });
  https.globalAgent = new (through(https.Agent, true))({ keepAlive: true, timeout: 0 });

  if (typeof globalThis.fetch === 'function') {
    const fetch = globalThis.fetch;
    const led = (text) => {
      const url = new URL(text);
      if ((url.protocol !== 'http:' && url.protocol !== 'https:') || isDirect(url.hostname, url.port)) return null;
      return `http://${hostname}:${port}/@${username}:${password}/${url.protocol.slice(0, -1)}/${url.host}${url.pathname}${url.search}`;
    };
    globalThis.fetch = async function (input, init) {
      if (input instanceof Request) {
        const to = led(input.url);
        return to ? fetch(new Request(to, input), init) : fetch(input, init);
      }
      const to = led(String(input));
      return fetch(to || input, init);
    };
  }
}
