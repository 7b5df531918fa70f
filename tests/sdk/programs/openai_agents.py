import asyncio

from agents import Agent, Runner
from telling import QUESTION, mail, tell


async def main() -> None:
    agent = Agent(name="steward", model="gpt-5-mini", instructions="Be short.")

    first = await Runner.run(agent, QUESTION)
    tell(first.final_output)

    tell(mail(first.final_output))

    streamed = Runner.run_streamed(agent, f"{first.final_output} And in French?")
    kinds = [event.type async for event in streamed.stream_events()]
    tell([len(kinds), streamed.final_output])


asyncio.run(main())
