import asyncio
import sys

from telling import URL, tell

httpx = __import__(sys.argv[1])  # httpx and httpx2 are asked in the same way


async def main() -> None:
    async with httpx.AsyncClient(base_url=URL) as client:
        asked = await client.post("/orders", json={"lines": [{"sku": "rice", "count": 1}]})
        order = asked.raise_for_status().json()
        tell(order)
        tell((await client.post("/email/send", json={"to": "ada@example.org"})).raise_for_status().json())
        stream = {"model": "m", "messages": [{"role": "user", "content": order["id"]}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=stream) as answer:
            answer.raise_for_status()
            tell([line async for line in answer.aiter_lines()])


asyncio.run(main())
