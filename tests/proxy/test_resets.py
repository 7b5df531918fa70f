"""A client that resets its connection has not read what its kernel took for it: its retry is the same step."""

import socket
import time

import pytest

from tests.raw import Wire, asked, headers, looked_at, request, stopped
from tests.stack import Stack

BODY = b'{"total": 5}'


@pytest.mark.parametrize("at_once", [False, True], ids=["after its delivery was counted", "at once"])
def test_a_reset_is_seen_before_the_retry_beside_it(shared: Stack, run: str, at_once: bool) -> None:
    """The retry comes by a connection that is open already, and the sidecar finds both in the same moment."""
    agent, url = shared.claim(run), shared.url("/any/reset")
    beside = Wire.to(agent)
    read(beside, request(agent, "GET", shared.url("/pantry")))
    unread = asked(agent, "POST", url, body=BODY)
    unread.wait_for_bytes()
    if not at_once:
        looked_at(agent)
    retry = request(agent, "POST", url, body=BODY)
    with stopped(shared.sidecar):
        beside.send(retry[:9])
        unread.reset()
        beside.send(retry[9:])
    assert (b"Twiceshy-Replayed", b"true") in headers(beside.head())
    assert len(shared.received("any")) == 1


def test_a_reset_is_seen_before_any_other_request_beside_it(shared: Stack, run: str) -> None:
    """What another request of the attempt begins, in the same moment, does not make the answer read."""
    agent, url = shared.claim(run), shared.url("/any/reset")
    beside = Wire.to(agent)
    read(beside, request(agent, "GET", shared.url("/pantry")))
    unread = asked(agent, "POST", url, body=BODY)
    unread.wait_for_bytes()
    looked_at(agent)
    other = request(agent, "POST", shared.url("/any/other"), body=BODY)
    with stopped(shared.sidecar):
        beside.send(other[:9])
        unread.reset()
        beside.send(other[9:])
    beside.head()
    assert agent.ask("POST", url, BODY).replayed
    assert len(shared.received("any")) == 2


def test_a_reset_in_time_counts_however_late_it_is_seen(shared: Stack, run: str) -> None:
    """The sidecar stood still for longer than it keeps in mind what was delivered."""
    agent, url = shared.claim(run), shared.url("/any/reset")
    unread = asked(agent, "POST", url, body=BODY)
    unread.wait_for_bytes()
    looked_at(agent)
    with stopped(shared.sidecar):
        unread.reset()
        time.sleep(1.1)
    assert agent.ask("POST", url, BODY).replayed
    assert len(shared.received("any")) == 1


def test_a_reset_behind_a_plain_end_is_a_reset(shared: Stack, run: str) -> None:
    """Who says that it will ask nothing more, and then closes without having read."""
    agent, url = shared.claim(run), shared.url("/any/reset")
    unread = asked(agent, "POST", url, body=BODY)
    unread.wait_for_bytes()
    looked_at(agent)
    with stopped(shared.sidecar):
        unread.sock.shutdown(socket.SHUT_WR)
        unread.sock.close()  # what is unread makes the kernel reset it
    assert agent.ask("POST", url, BODY).replayed
    assert len(shared.received("any")) == 1


def read(wire: Wire, data: bytes) -> bytes:
    """Send a request by *wire*, and take its answer's body."""
    wire.send(data)
    found = {name.lower(): value for name, value in headers(wire.head())}
    return wire.exactly(int(found[b"content-length"]))
