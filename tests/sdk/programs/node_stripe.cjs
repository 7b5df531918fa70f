'use strict';
const Stripe = require('stripe');
const { url, tell } = require('./telling.cjs');

// It takes a host and a port, and no path before its own: here is what stands in for that.
const { hostname, port } = new URL(url);
const client = new Stripe('sk_test_1', { host: hostname, port, protocol: 'https' });

(async () => {
  const first = await client.refunds.create({ charge: 'ch_1', amount: 1250 });
  tell(first.id);
  tell((await client.refunds.retrieve(first.id)).amount);
  tell((await client.refunds.create({ charge: 'ch_2', amount: 990 })).id);
})();
