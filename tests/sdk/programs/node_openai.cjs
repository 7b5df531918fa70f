'use strict';
const { OpenAI } = require('openai');
const { tell, question, mail } = require('./telling.cjs');

(async () => {
  const client = new OpenAI();
  const messages = [{ role: 'user', content: question }];
  const first = await client.chat.completions.create({ model: 'gpt-5-mini', messages });
  const said = first.choices[0].message.content;
  tell(said);

  tell(await mail(said));

  messages.push({ role: 'assistant', content: said }, { role: 'user', content: 'And in French?' });
  const parts = [];
  for await (const event of await client.chat.completions.create({ model: 'gpt-5-mini', messages, stream: true }))
    parts.push(event.choices[0].delta.content ?? null);
  tell(parts);
})();
