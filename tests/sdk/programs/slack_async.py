import asyncio

from slack_sdk.web.async_client import AsyncWebClient
from telling import URL, tell


async def main() -> None:
    client = AsyncWebClient("xoxb-1", base_url=f"{URL}/slack/")
    first = await client.chat_postMessage(channel="#pantry", text="rice is out")
    tell(first["ts"])
    tell((await client.chat_postMessage(channel="#pantry", text="ordered", thread_ts=first["ts"])).data)


asyncio.run(main())
