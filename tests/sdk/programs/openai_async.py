import asyncio

from openai import AsyncOpenAI
from telling import QUESTION, mail, tell


async def main() -> None:
    async with AsyncOpenAI() as client:
        asked = [{"role": "user", "content": QUESTION}]
        first = await client.chat.completions.create(model="gpt-5-mini", messages=asked)
        said = first.choices[0].message.content
        tell(said)

        tell(mail(said))

        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
        events = await client.chat.completions.create(model="gpt-5-mini", messages=asked, stream=True)
        tell([event.choices[0].delta.content async for event in events])


asyncio.run(main())
