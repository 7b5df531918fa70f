import asyncio
import logging
import os

from mcp import Client

logging.disable()


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def main() -> None:
    try:
        async with Client(f"{os.environ['SANDBOX_URL']}/mcp") as client:
            print("opened", flush=True)
            await client.call_tool("refund", {"what": "tea"})
    except BaseException as error:
        print(type(leaf(error)).__name__, leaf(error))


asyncio.run(main())
