"""Starting and steering runs from anywhere, over the HTTP API (docs/api.md).

    client = twiceshy.Client()                       # TWICESHY_API, TWICESHY_API_KEY
    run = client.start("refund", {"order": "A-1001"}, key="ticket-4711")
    client.signal(run, "paid", {"cents": 990})
    print(client.result(run, timeout=60))

An agent starts and awaits runs with ``twiceshy.start`` and ``twiceshy.result`` instead: those are steps of its own run.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from twiceshy import wire
from twiceshy.asking import dump, insist, seconds
from twiceshy.drive import awaited, blocking
from twiceshy.errors import ChildFailed, TimedOut
from twiceshy.operation import Operation

#: How long one question for a result is held open, in seconds.
POLL = 20.0
#: How long any answer may take beyond that.
PATIENCE = 30.0


class _Api:
    def __init__(self, address: str | None = None, key: str | None = None) -> None:
        self.address = (address or os.environ.get("TWICESHY_API") or "http://127.0.0.1:7778").rstrip("/")
        self._key = key or os.environ.get("TWICESHY_API_KEY") or ""
        if not self._key:
            raise ValueError("the API wants a key: Client(key=…), or TWICESHY_API_KEY")

    def _ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Operation[wire.Reply]:
        data = None if body is None else dump(body, "what is sent to the API")
        given = {"Authorization": f"Bearer {self._key}", **(headers or {})}
        what = wire.Ask(method, f"{self.address}/v1{path}", data, given, direct=True, timeout=POLL + PATIENCE)
        return (yield from insist(what))


def _start(
    api: _Api, agent: str, given: Any = None, *, key: str | None = None, run: str | None = None,
    priority: int | None = None, attributes: Mapping[str, str] | None = None,
) -> Operation[str]:  # fmt: skip
    """Start a run of *agent*; its id. With *key* the same start, asked for again, is the same run."""
    # Where no answer comes this is sent again, and must be one start.
    key = str(uuid4()) if key is None and run is None else key
    body: dict[str, Any] = {"agent": agent, "input": given}
    more = {"run": run, "priority": priority, "attributes": None if attributes is None else dict(attributes)}
    body.update({name: value for name, value in more.items() if value is not None})
    reply = yield from api._ask("POST", "/runs", body, None if key is None else {"Idempotency-Key": key})
    return str(reply.json()["id"])


def _signal(api: _Api, run: str, name: str, payload: Any = None, *, id: str | None = None) -> Operation[None]:  # noqa: A002
    """Send *run* the event *name*. Sent again under the same *id*, it is one event."""
    body = {"name": name, "payload": payload, "id": f"e{uuid4().hex}" if id is None else id}
    yield from api._ask("POST", f"/runs/{wire.quoted(run)}/events", body)


def _result(api: _Api, run: str, timeout: float | timedelta | None = None) -> Operation[Any]:
    """The result of *run*, or of the one that it goes on as. Raises ChildFailed, TimedOut."""
    until = None if timeout is None else time.monotonic() + seconds(timeout)
    while True:
        left = POLL if until is None else max(min(until - time.monotonic(), POLL), 0.0)
        query = urlencode({"timeout": f"{left:.3f}"})
        reply = yield from api._ask("GET", f"/runs/{wire.quoted(run)}/result?{query}")
        said = reply.json()
        if reply.status != 202:
            if said["status"] != "done":
                raise ChildFailed(said["run"], said["status"], said.get("error"))
            return said["result"]
        if until is not None and time.monotonic() >= until:
            raise TimedOut(f"run {run} did not end within {timeout}: it is {said.get('status', 'not done')}")


def _cancel(api: _Api, run: str) -> Operation[None]:
    """End *run*, however it stands."""
    yield from api._ask("POST", f"/runs/{wire.quoted(run)}/cancel")


def _decide(
    api: _Api, run: str, approval: str, approved: bool, *, by: str | None = None, comment: str | None = None
) -> Operation[Any]:
    """Decide an approval that *run* waits for, by its id, or by name while there is but one. The first one counts."""
    body = {"decision": "approve" if approved else "decline", "by": by, "comment": comment}
    given = {name: value for name, value in body.items() if value is not None}
    reply = yield from api._ask("POST", f"/approvals/{wire.quoted(run)}/{wire.quoted(approval)}", given)
    return json.loads(reply.body or b"null")


class Client(_Api):
    """The API, blocking."""

    start = blocking(_start)
    signal = blocking(_signal)
    result = blocking(_result)
    cancel = blocking(_cancel)
    decide = blocking(_decide)


class AsyncClient(_Api):
    """The API, awaited."""

    start = awaited(_start)
    signal = awaited(_signal)
    result = awaited(_result)
    cancel = awaited(_cancel)
    decide = awaited(_decide)
