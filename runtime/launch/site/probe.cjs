// Asks for a name that only the sidecar knows, by Node's own clients (`twiceshy doctor`): node [FLAGS] -e TEXT HOST
// Prints a line for each client and scheme; what it means is judged elsewhere.
'use strict';

const SECONDS = 10;
const host = process.argv[1];
const say = (what) => process.stdout.write(`\ntwiceshy-probe ${JSON.stringify(what)}\n`);
const words = (error) => {
  const found = [];
  for (let each = error; each && found.length < 8; each = each.cause) found.push(`${each.code || each.name}: ${each.message}`);
  return found.join(' < ').slice(0, 2000);
};
const clients = {
  https: (url) => new Promise((done, fail) => {
    const asked = require(url.split(':')[0]).get(url, { timeout: SECONDS * 1000 }, (answer) => {
      let text = '';
      answer.setEncoding('utf8').on('data', (data) => (text += data)).on('end', () => done(text)).on('error', fail);
    });
    asked.on('error', fail).on('timeout', () => asked.destroy(new Error(`no answer within ${SECONDS} s`)));
  }),
};
if (typeof fetch === 'function') {
  clients.fetch = async (url) => (await fetch(url, { signal: AbortSignal.timeout(SECONDS * 1000) })).text();
}
say({ interpreter: `Node ${process.versions.node}`, path: process.execPath });
Promise.all(Object.entries(clients).map(async ([client, ask]) => {
  for (const scheme of ['http', 'https']) {
    const told = { client, scheme, version: '', answer: null, error: null };
    try {
      told.answer = (await ask(`${scheme}://${host}/`)).slice(0, 2000);
    } catch (error) {
      told.error = words(error);
    }
    say(told);
  }
})).then(() => process.exit(0));
