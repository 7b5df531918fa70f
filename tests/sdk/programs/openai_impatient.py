from openai import OpenAI
from telling import QUESTION, tell

client = OpenAI(timeout=1)

asked = [{"role": "user", "content": QUESTION}]
answer = client.chat.completions.create(model="gpt-5-mini", messages=asked)
tell(answer.choices[0].message.content)
