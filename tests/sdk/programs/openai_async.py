import asyncio

from openai import AsyncOpenAI
from telling import QUESTION, mail, tell


async def main() -> None:
    async with AsyncOpenAI() as client:
        first = await client.responses.create(model="gpt-5-mini", input=QUESTION)
        tell(first.output_text)

        tell(mail(first.output_text))

        asked = f"{first.output_text} And in French?"
        events = await client.responses.create(model="gpt-5-mini", input=asked, stream=True)
        tell([event.delta async for event in events if event.type == "response.output_text.delta"])


asyncio.run(main())
