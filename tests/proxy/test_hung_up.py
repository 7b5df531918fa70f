"""A client that goes away while the database keeps its answer waiting: its retry is the same step (DESIGN §3.3)."""

import contextlib

import pytest

from tests.raw import Wire, locked, request, stopped
from tests.stack import Attempt, Stack

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
JOB = {"name": "embed", "input": 1}


@pytest.mark.parametrize("size", [100_000, 3_000_000], ids=["in its row", "in pieces"])
def test_a_retry_of_who_left_before_a_replay_was_read_from_the_journal(shared: Stack, run: str, size: int) -> None:
    path = f"/any/large?size={size}"
    assert shared.claim(run).ask("POST", shared.url(path), ORDER).status == 200
    second = shared.claim(run)
    assert second.ask("GET", shared.url("/pantry")).status == 200  # the journal is read
    with locked(shared.dsn, run, "twiceshy.answer, twiceshy.body") as lock:
        given_up = second.send("POST", shared.url(path), ORDER)
        lock.wait_wanted()
        given_up.close()
        retry = second.in_background("POST", shared.url(path), ORDER)
        with contextlib.suppress(TimeoutError):  # several beats: it would have been sent by then
            shared.sandbox.wait_for(lambda: len(shared.received("any")) > 1, timeout=0.5)
    assert (retry.result().replayed, len(retry.result().body)) == (True, size)
    assert len(shared.received("any")) == 1


def test_a_retry_of_who_left_before_a_local_step_was_begun(shared: Stack, run: str) -> None:
    agent = shared.claim(run)
    assert agent.ask("GET", shared.url("/pantry")).status == 200
    with locked(shared.dsn, run) as lock:
        given_up = agent.send("POST", "http://twiceshy.internal/steps", JOB)
        lock.wait_wanted()
        given_up.close()
        retry = agent.in_background("POST", "http://twiceshy.internal/steps", JOB)
        _understood(agent)
    assert retry.result().status == 201
    assert len(shared.fetch("SELECT FROM twiceshy.step WHERE run_id = $1 AND kind = 'local'", run)) == 1


def _understood(agent: Attempt) -> None:
    """Several beats pass."""
    for _ in range(60):
        agent.report()


def test_who_gave_up_asks_for_nothing_more_than_his_retry_has(shared: Stack, run: str) -> None:
    """The retry is understood first: what it takes the place of must not become another step."""
    agent, url = shared.claim(run), shared.url("/any/slow")
    shared.sandbox.fault(match={"path": "/any/slow"}, hold="slow")
    asked = request(agent, "POST", url, body=b'{"total": 5}')
    given_up, retry = Wire.to(agent), Wire.to(agent)
    retry.send(asked[:9])
    agent.report()  # both are known to the sidecar
    with stopped(shared.sidecar):
        retry.send(asked[9:20])
        given_up.send(asked)
        given_up.close()
        retry.send(asked[20:])
    with contextlib.suppress(TimeoutError):  # several beats: it would have been sent by then
        shared.sandbox.wait_for(lambda: len(shared.received("any")) > 1, timeout=0.3)
    shared.sandbox.release("slow")
    assert retry.head().startswith(b"HTTP/1.1 200 ")
    assert len(shared.received("any")) == 1
