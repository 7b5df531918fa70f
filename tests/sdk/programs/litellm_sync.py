import sys

import litellm
from telling import QUESTION, mail, tell

model = sys.argv[1]
asked = [{"role": "user", "content": QUESTION}]

first = litellm.completion(model=model, messages=asked)
said = first.choices[0].message.content
tell(said)

tell(mail(said))

asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
tell([event.choices[0].delta.content for event in litellm.completion(model=model, messages=asked, stream=True)])
