import asyncio

from google import genai
from telling import QUESTION, mail, tell


async def main() -> None:
    models = genai.Client().aio.models
    first = await models.generate_content(model="gemini-2.5-flash", contents=QUESTION)
    tell(first.text)

    tell(mail(first.text))

    events = await models.generate_content_stream(model="gemini-2.5-flash", contents=first.text + " And in French?")
    tell([event.text async for event in events])


asyncio.run(main())
