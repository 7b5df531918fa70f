import asyncio

from anthropic import AsyncAnthropic
from telling import QUESTION, mail, tell


async def main() -> None:
    async with AsyncAnthropic() as client:
        asked = [{"role": "user", "content": QUESTION}]
        first = await client.messages.create(model="claude-sonnet-4-5", max_tokens=100, messages=asked)
        said = first.content[0].text
        tell(said)

        tell(mail(said))

        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "And in French?"}]
        async with client.messages.stream(model="claude-sonnet-4-5", max_tokens=100, messages=asked) as stream:
            tell([text async for text in stream.text_stream])


asyncio.run(main())
