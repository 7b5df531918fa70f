import asyncio
import sys

import litellm
from telling import QUESTION, mail, tell

model = sys.argv[1]


async def main() -> None:
    asked = [{"role": "user", "content": QUESTION}]
    first = await litellm.acompletion(model=model, messages=asked)
    said = first.choices[0].message.content
    tell(said)

    tell(mail(said))

    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
    events = await litellm.acompletion(model=model, messages=asked, stream=True)
    tell([event.choices[0].delta.content async for event in events])


asyncio.run(main())
