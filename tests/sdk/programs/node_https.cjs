'use strict';
const https = require('https');
const { url, tell, letter } = require('./telling.cjs');

const post = (path, body) =>
  new Promise((done, fail) => {
    const asking = https.request(url + path, { method: 'POST', headers: { 'Content-Type': 'application/json' } });
    asking.on('error', fail);
    asking.on('response', (answer) => {
      let text = '';
      answer.setEncoding('utf8').on('data', (data) => (text += data));
      answer.on('error', fail).on('end', () => {
        if (answer.statusCode < 300) done(text);
        else fail(new Error(`${answer.statusCode} ${answer.statusMessage}`));
      });
    });
    asking.end(JSON.stringify(body));
  });

(async () => {
  const order = JSON.parse(await post('/orders', { lines: [{ sku: 'rice', count: 1 }] }));
  tell(order);
  tell(JSON.parse(await post('/email/send', letter(order.id))));
  const asked = { model: 'm', messages: [{ role: 'user', content: order.id }], stream: true };
  tell(await post('/v1/chat/completions', asked));
})();
