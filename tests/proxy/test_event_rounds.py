"""A hundred events around their waits, from ten senders at once, whoever dies: each is taken once."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from runtime import events
from tests.proxy.waiting import AGENT_API, SENDERS, call, round_of, until_open
from tests.stack import Stack, stack

pytestmark = pytest.mark.check_all


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that looks often, and parks nothing."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), poll=0.05, hold=60) as made:
        yield made


def test_a_hundred_rounds(shared: Stack) -> None:
    for n in range(3, 103):
        round_of(shared, n, sidecar_dies=n % 5 == 0)


def test_a_run_that_is_parked_while_ten_send(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parking and sending meet; the run is awake afterwards, and the event is there once."""
    with stack(dsn, tmp_path_factory.mktemp("stack"), poll=0.05, hold=0.05, park_quiet=0.05) as made:
        for n in range(10):
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
