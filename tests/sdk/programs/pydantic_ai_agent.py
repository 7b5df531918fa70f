import asyncio

from pydantic_ai import Agent
from telling import QUESTION, mail, tell


async def main() -> None:
    agent = Agent("openai:gpt-5-mini", instructions="Be short.")

    first = await agent.run(QUESTION)
    tell(first.output)

    tell(mail(first.output))

    async with agent.run_stream("And in French?", message_history=first.all_messages()) as streamed:
        tell([text async for text in streamed.stream_text(delta=True, debounce_by=None)])


asyncio.run(main())
