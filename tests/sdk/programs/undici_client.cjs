'use strict';
const undici = require('undici');
const { url, tell, letter } = require('./telling.cjs');

// undici_client.cjs own | proxy | fetch: through its own dispatcher, through a ProxyAgent, by its own fetch
const how = process.argv[2];
const proxy = new URL(process.env.HTTPS_PROXY);
const token = `Basic ${Buffer.from(`${proxy.username}:${proxy.password}`).toString('base64')}`;
const dispatcher =
  how === 'proxy' ? new undici.ProxyAgent({ uri: proxy.origin, token: proxy.username && token }) : undefined;

const post = async (path, body) => {
  const asked = { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) };
  if (how === 'fetch') {
    const answer = await undici.fetch(url + path, asked);
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    return answer.text();
  }
  const answer = await undici.request(url + path, { ...asked, dispatcher });
  const text = await answer.body.text();
  if (answer.statusCode >= 300) throw new Error(`${answer.statusCode}: ${text}`);
  return text;
};

(async () => {
  const order = JSON.parse(await post('/orders', { lines: [{ sku: 'rice', count: 1 }] }));
  tell(order);
  tell(JSON.parse(await post('/email/send', letter(order.id))));
  const asked = { model: 'm', messages: [{ role: 'user', content: order.id }], stream: true };
  tell(await post('/v1/chat/completions', asked));
})();
