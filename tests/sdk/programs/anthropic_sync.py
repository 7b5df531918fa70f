from anthropic import Anthropic
from telling import QUESTION, mail, tell

client = Anthropic()
asked = [{"role": "user", "content": QUESTION}]

first = client.messages.create(model="claude-sonnet-4-5", max_tokens=100, messages=asked)
said = first.content[0].text
tell(said)

tell(mail(said))

asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
with client.messages.stream(model="claude-sonnet-4-5", max_tokens=100, messages=asked) as stream:
    tell(list(stream.text_stream))
