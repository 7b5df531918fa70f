from openai import OpenAI
from telling import QUESTION, mail, tell

client = OpenAI()
asked = [{"role": "user", "content": QUESTION}]

first = client.chat.completions.create(model="gpt-5-mini", messages=asked)
said = first.choices[0].message.content
tell(said)

tell(mail(said))

asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
events = client.chat.completions.create(model="gpt-5-mini", messages=asked, stream=True)
tell([event.choices[0].delta.content for event in events])
