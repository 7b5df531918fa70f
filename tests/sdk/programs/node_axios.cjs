'use strict';
const axios = require('axios');
const { url, tell, letter } = require('./telling.cjs');

(async () => {
  const client = axios.create({ baseURL: url });
  const order = (await client.post('/orders', { lines: [{ sku: 'rice', count: 1 }] })).data;
  tell(order);
  tell((await client.post('/email/send', letter(order.id))).data);
  const asked = { model: 'm', messages: [{ role: 'user', content: order.id }], stream: true };
  tell((await client.post('/v1/chat/completions', asked)).data);
})().catch((error) => {
  // All of it would be many pages.
  console.error(error.message, error.response?.statusText);
  process.exitCode = 1;
});
