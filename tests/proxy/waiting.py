"""What tests of waits share: how one asks and is answered, what happens meanwhile, and rounds drawn by their number."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from runtime import events
from tests.apart import ask_database
from tests.stack import Attempt, Reply, Stack

AGENT_API = "http://twiceshy.internal"
SENDERS = 10
#: When an event is sent, in seconds from the wait's beginning.
OFFSETS = {"before": -0.1, "during": 0.0, "after": 0.1}


def ask(attempt: Attempt, path: str, body: dict[str, Any] | None = None, step: str | None = None) -> Reply:
    headers = {} if step is None else {"Twiceshy-Step": step}
    return attempt.ask("POST", AGENT_API + path, body, headers)


def send(stack: Stack, run: str, name: str, payload: bytes = b"{}", id: str | None = None) -> events.Sent:  # noqa: A002
    return ask_database(stack.dsn, events.send, run, name, payload, id, limit=1 << 20)


def open_steps(stack: Stack, run: str) -> int:
    rows = stack.fetch("SELECT FROM twiceshy.step WHERE run_id = $1 AND state = 'sent'", run)
    return len(rows)


def until_open(stack: Stack, run: str, count: int = 1) -> None:
    deadline = time.monotonic() + 20
    while open_steps(stack, run) < count:
        assert time.monotonic() < deadline, "the step was not begun"
        time.sleep(0.01)


def call(stack: Stack, verb: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return ask_database(stack.dsn, verb, *arguments, **named)


def until_due(stack: Stack, run: str, key: str) -> None:
    """Return some milliseconds before the deadline of the step, once it is there, by the database's clock."""
    due = (
        "SELECT clock_timestamp() >= deadline - interval '5 ms' AS due "
        "FROM twiceshy.step WHERE run_id = $1 AND key = $2"
    )
    give_up = time.monotonic() + 30
    while not any(row["due"] for row in stack.fetch(due, run, key)):
        assert time.monotonic() < give_up, f"step {key} was not begun"


def senders(stack: Stack, run: str, after: float) -> list[threading.Timer]:
    """Ten that send the same event at the same time, in *after* seconds."""
    together = threading.Barrier(SENDERS)

    def one() -> None:
        together.wait(30)
        send(stack, run, "go", b'{"n": 1}', "one")

    return [threading.Timer(after, one) for _ in range(SENDERS)]


def round_of(stack: Stack, n: int, *, sidecar_dies: bool) -> None:
    run, chance = f"round-{n}", random.Random(n)
    offset = OFFSETS[chance.choice(list(OFFSETS))]
    dies = chance.choice(["nobody", "agent", "agent"]) if not sidecar_dies else "sidecar"
    attempt = stack.claim(run)
    timers = senders(stack, run, max(0.0, offset))
    for each in timers:
        each.start()
    if offset < 0:
        threading.Event().wait(-offset)
    waiting = attempt.in_background("POST", AGENT_API + "/events/go/wait")
    if dies != "nobody":
        threading.Event().wait(chance.uniform(0, 0.25))
        if dies == "sidecar":
            stack.restart()
        attempt.die()
        attempt = stack.claim(run)
        waiting = attempt.in_background("POST", AGENT_API + "/events/go/wait")
    reply = waiting.result()
    for each in timers:
        each.join()
    assert reply.json()["event"]["id"] == "one"
    # It is taken: by nobody else, whether in this attempt or in the next.
    assert ask(attempt, "/events/go/wait", {"timeout": 0}).json() == {"timeout": True}
    later = stack.claim(run)
    assert ask(later, "/events/go/wait").body == reply.body
    assert ask(later, "/events/go/wait", {"timeout": 0}).json() == {"timeout": True}
    [row] = stack.fetch("SELECT consumed_by FROM twiceshy.event WHERE run_id = $1", run)
    assert row["consumed_by"] == reply.step
