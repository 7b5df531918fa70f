import asyncio
import logging

from mcp import Client
from mcp.types import ElicitResult
from telling import URL, tell

logging.disable()


async def main() -> None:
    async def approve(_context: object, _params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    async def progress(done: float, _total: float | None, _message: str | None) -> None:
        heard.append(done)

    heard: list[float] = []
    async with Client(f"{URL}/mcp", elicitation_callback=approve) as client:
        tell((await client.call_tool("refund", {"what": "tea"})).content[0].text)
        report = await client.call_tool("report", {"what": "milk"}, progress_callback=progress)
        tell([report.content[0].text, heard])
        tell((await client.call_tool("transfer", {"what": "5 EUR"})).content[0].text)
        failed = await client.call_tool("fail")
        tell([failed.is_error, [tool.name for tool in (await client.list_tools()).tools]])
        tell((await client.call_tool("refund", {"what": "tea"})).content[0].text)


asyncio.run(main())
