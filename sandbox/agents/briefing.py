"""Writes a briefing: a model plans it, writes its parts at the same time, and the whole is mailed.

    [agents.briefing]
    command = ["python", "briefing.py"]

    twiceshy start briefing --input '{"topic": "tea", "to": "ada@example.org"}'

Each model call is paid for once, and the mail is sent once, whatever dies meanwhile. The mail is a plain request: what
goes out over HTTP needs nothing of twiceshy.
"""

import asyncio
import json
import os
from typing import Any
from urllib.request import Request, urlopen

import twiceshy
from twiceshy import aio

PARTS = {
    "type": "object",
    "properties": {"queries": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5}},
    "required": ["queries"],
}


def send(to: str, subject: str, text: str) -> str:
    """Send a mail; its id."""
    letter = json.dumps({"to": to, "subject": subject, "text": text}).encode()
    with urlopen(Request(os.environ["SANDBOX_URL"] + "/email/send", letter)) as answer:
        return str(json.load(answer)["id"])


@twiceshy.agent
async def briefing(given: Any) -> Any:
    """Write about ``topic`` and send it ``to``."""
    topic = given["topic"]
    plan = await aio.llm(
        json.dumps({"topic": topic}), system="You plan research. Answer with JSON: queries.", schema=PARTS
    )
    parts = await asyncio.gather(*(aio.llm(f"Write one paragraph: {query}") for query in plan["queries"]))
    day = (await aio.now()).date()
    mail = await asyncio.to_thread(send, given["to"], f"{topic}, {day}", "\n\n".join(parts))
    return {"parts": len(parts), "mail": mail}


if __name__ == "__main__":
    briefing.main()
