import asyncio

import aiohttp
from telling import URL, tell


async def main() -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(URL + "/orders", json={"lines": [{"sku": "rice", "count": 1}]}) as answer:
            order = await answer.json()
            tell(order)
        async with session.post(URL + "/email/send", json={"to": "ada@example.org"}) as answer:
            tell(await answer.json())
        stream = {"model": "m", "messages": [{"role": "user", "content": order["id"]}], "stream": True}
        async with session.post(URL + "/v1/chat/completions", json=stream) as answer:
            tell([line.decode() async for line in answer.content])


asyncio.run(main())
