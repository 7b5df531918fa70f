'use strict';
const { Anthropic } = require('@anthropic-ai/sdk');
const { tell, question, mail } = require('./telling.cjs');

(async () => {
  const client = new Anthropic();
  const more = { model: 'claude-sonnet-4-5', max_tokens: 100 };
  const messages = [{ role: 'user', content: question }];
  const first = await client.messages.create({ ...more, messages });
  const said = first.content[0].text;
  tell(said);

  tell(await mail(said));

  messages.push({ role: 'assistant', content: said }, { role: 'user', content: 'And in French?' });
  const last = await client.messages.stream({ ...more, messages }).finalMessage();
  tell(last.content[0].text);
})();
