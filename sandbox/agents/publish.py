"""Drafts an article, lets it rest, and publishes it if somebody approves within three days.

    twiceshy start publish --input '{"topic": "tea"}'

Neither the rest nor the wait for the approval holds a process.
"""

import json
import os
from datetime import timedelta
from typing import Any
from urllib.request import Request, urlopen

import twiceshy


def post(path: str, body: Any) -> Any:
    """Make something in the shop; what it is."""
    data = json.dumps(body).encode()
    with urlopen(Request(os.environ["SANDBOX_URL"] + path, data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


@twiceshy.agent
def publish(given: Any) -> Any:
    """Write about ``topic``; ``rest``, ``patience``: seconds, in the place of an hour and three days."""
    draft = twiceshy.llm(f"Write an article: {given['topic']}")
    twiceshy.sleep(given.get("rest", 3600))
    try:
        approval = twiceshy.wait_approval("publish", {"draft": draft}, timeout=given.get("patience", timedelta(days=3)))
    except twiceshy.TimedOut:
        post("/email/send", {"to": "editor@example.org", "subject": "Nobody looked at it", "text": draft})
        return "timed out"
    if not approval:
        return f"declined by {approval.by}"
    return post("/crm/notes", {"text": draft, "approved_by": approval.by})["id"]


if __name__ == "__main__":
    publish.main()
