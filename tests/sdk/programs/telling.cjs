// What these programs share: they say what they got, write a letter, and die where somebody wants that.
'use strict';
const fs = require('fs');

const { SANDBOX_URL: url, HERE: here, DIES: dies } = process.env;
let turn = 0;
let said = 0;
if (dies) {
  fs.appendFileSync(`${here}/starts`, 'x');
  turn = fs.statSync(`${here}/starts`).size;
}

// The n-th start dies by SIGKILL when it has said its n-th thing.
const tell = (what) => {
  said += 1;
  fs.writeSync(1, `${said} ${JSON.stringify(what)}\n`);
  if (said !== turn) return;
  process.kill(process.pid, 'SIGKILL');
  for (;;);
};

const question = 'Say in one sentence what is in the pantry.';
const letter = (text) => ({ to: 'ada@example.org', subject: 'pantry', text });
const mail = async (text) => {
  const headers = { 'Content-Type': 'application/json' };
  const body = JSON.stringify(letter(text));
  const answer = await fetch(`${url}/email/send`, { method: 'POST', headers, body });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
};

module.exports = { url, tell, question, letter, mail };
