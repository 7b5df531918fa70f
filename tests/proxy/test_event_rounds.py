"""An event around its wait, from ten senders at once, whoever dies: taken once. And what happens at a deadline.

Each round is a run of its own; when its event is sent, and what dies, is drawn from the round's number.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from runtime import events
from tests.proxy.test_approvals import call, until_due
from tests.proxy.test_waits import AGENT_API, ask, send, until_open
from tests.stack import Stack, stack

SENDERS = 10
#: When the event is sent, in seconds from the wait's beginning.
OFFSETS = {"before": -0.1, "during": 0.0, "after": 0.1}


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that looks often, and parks nothing."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), poll=0.05, hold=60) as made:
        yield made


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


def test_an_event_from_ten_senders_is_taken_once(shared: Stack) -> None:
    for n in range(3):
        round_of(shared, n, sidecar_dies=False)


@pytest.mark.check_all
def test_a_hundred_rounds(shared: Stack) -> None:
    for n in range(3, 103):
        round_of(shared, n, sidecar_dies=n % 5 == 0)


def test_a_timeout_and_an_event_at_the_same_instant(shared: Stack) -> None:
    """One of the two is recorded and stays; what was not taken is there for the next wait."""
    attempt, ends = shared.claim("instant"), {}
    for n in range(8):
        key, name = f"w{n}", f"go{n}"
        waiting = attempt.in_background(
            "POST", AGENT_API + f"/events/{name}/wait", {"timeout": 0.1}, {"Twiceshy-Step": key}
        )
        until_open(shared, "instant")
        until_due(shared, "instant", key)
        call(shared, events.send, "instant", name, b"1", "e", limit=10)
        ends[name] = waiting.result().json()
        left = ask(attempt, f"/events/{name}/wait", {"timeout": 0}, key + "-again").json()
        assert ("event" in ends[name]) != ("event" in left), (ends[name], left)
    later = shared.claim("instant")
    for n, (name, end) in enumerate(ends.items()):
        assert ask(later, f"/events/{name}/wait", {"timeout": 0.1}, f"w{n}").json() == end


def test_a_run_that_is_parked_while_ten_send(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parking and sending meet; the run is awake afterwards, and the event is there once."""
    with stack(dsn, tmp_path_factory.mktemp("stack"), poll=0.05, hold=0.05, park_quiet=0.05) as made:
        for n in range(4):
            attempt = made.claim("parks")
            path = AGENT_API + f"/events/go{n}/wait"
            waiting = attempt.in_background("POST", path)
            until_open(made, "parks")

            def one(k: int, n: int = n) -> Any:
                return call(made, events.send, "parks", f"go{n}", b"1", f"e{k % 2}", limit=10).fresh

            with ThreadPoolExecutor(SENDERS) as threads:
                assert sum(threads.map(one, range(SENDERS))) == 2
            reply = None
            with contextlib.suppress(OSError):
                reply = waiting.result()
            if reply is None or reply.status != 200:
                assert reply is None or reply.error in ("parked", "not-running")
                assert made.fetch("SELECT status FROM twiceshy.run WHERE id = 'parks'")[0]["status"] == "queued"
                attempt = made.claim("parks")
                for before in range(n):
                    assert attempt.ask("POST", AGENT_API + f"/events/go{before}/wait").replayed
                reply = attempt.ask("POST", path)
            assert reply.json()["event"]["id"] in ("e0", "e1")
