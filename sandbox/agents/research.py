"""A research agent: plans with a model, searches three times at once, lets the model sum up, and mails it.

    export SANDBOX_URL=http://127.0.0.1:8900 OPENAI_BASE_URL=http://127.0.0.1:8900/v1 OPENAI_API_KEY=any
    python research.py "tea in Europe"

Async: OpenAI's SDK and aiohttp. MODEL says which model is asked. A plain program, written as if nothing ever crashed.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import aiohttp
from openai import AsyncOpenAI

WORLD = os.environ["SANDBOX_URL"]
MODEL = os.environ.get("MODEL", "gpt-sandbox")
PLAN = "You plan research. Answer with JSON: queries, three short ones for a search engine."
SUM_UP = "You sum up findings for a busy reader. Be short, and name your sources."
QUERIES = {
    "type": "object",
    "properties": {"queries": {"type": "array", "items": {"type": "string"}}},
    "required": ["queries"],
    "additionalProperties": False,
}

model = AsyncOpenAI()


def say(step: int, text: str) -> None:
    """Tell whoever watches how far we are."""
    print(f"{step} {text}", flush=True)
    number, _, flag = os.environ.get("AGENT_LINGER", "").partition(":")
    while number == str(step) and os.path.exists(flag):  # noqa: PTH110 - wait here, to be killed
        time.sleep(0.02)


async def plan(topic: str) -> list[str]:
    """Ask the model what to search for."""
    done = await model.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": PLAN}, {"role": "user", "content": json.dumps({"topic": topic})}],
        response_format={"type": "json_schema", "json_schema": {"name": "plan", "schema": QUERIES}},
    )
    return list(json.loads(done.choices[0].message.content or "")["queries"][:3])


async def search(web: aiohttp.ClientSession, query: str) -> list[Any]:
    """One search; what it found."""
    async with web.get(f"{WORLD}/search", params={"q": query}) as answer:
        answer.raise_for_status()
        return list((await answer.json())["results"])


async def sum_up(topic: str, findings: list[Any]) -> str:
    """Ask the model for a summary, and show its words as they come."""
    words: list[str] = []
    chunks = await model.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": SUM_UP},
            {"role": "user", "content": json.dumps({"topic": topic, "findings": findings})},
        ],
        stream=True,
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.content:
                words.append(choice.delta.content)
                print("  …" + words[-1], flush=True)
    return "".join(words)


async def main(topic: str) -> None:
    """Find out about one topic."""
    async with aiohttp.ClientSession() as web:
        queries = await plan(topic)
        say(1, f"plan: {', '.join(queries)}")

        found = await asyncio.gather(*(search(web, query) for query in queries))
        findings = [{"title": each["title"], "url": each["url"]} for results in found for each in results]
        say(2, f"{len(findings)} findings")

        text = await sum_up(topic, findings)
        say(3, f"summary of {len(text.split())} words")

        mail = {"to": "reader@example.org", "subject": topic, "text": text}
        async with web.post(f"{WORLD}/email/send", json=mail) as answer:
            answer.raise_for_status()
            say(4, f"mail {(await answer.json())['id']}")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "tea in Europe"))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
