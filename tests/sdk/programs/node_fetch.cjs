'use strict';
const { url, tell, mail } = require('./telling.cjs');

const post = async (path, body) => {
  const headers = { 'Content-Type': 'application/json' };
  const answer = await fetch(url + path, { method: 'POST', headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer;
};

(async () => {
  const order = await (await post('/orders', { lines: [{ sku: 'rice', count: 1 }] })).json();
  tell(order);
  tell(await mail(order.id));
  const asked = { model: 'm', messages: [{ role: 'user', content: order.id }], stream: true };
  tell(await (await post('/v1/chat/completions', asked)).text());
})();
