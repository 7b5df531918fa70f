"""Whose a tunnel is, as long as it lasts: it is cut with its attempt, holds its lease, and leaves nothing behind."""

import contextlib
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.cable import Cable
from tests.raw import OK, Origin, Wire, asked, connections, refused
from tests.stack import Attempt, Stack, stack
from tests.tunnelled import connected, passing, unopened


def test_a_zombies_tunnel_is_cut_when_another_attempt_speaks(shared: Stack, run: str, plain: Origin) -> None:
    wire, upstream = passing(shared.claim(run), plain)
    second = shared.claim(run)
    assert second.ask("GET", "http://twiceshy.internal/run").status == 200
    assert wire.is_reset()
    assert upstream.is_reset()
    passing(second, plain)


def test_and_when_another_has_claimed_and_says_nothing(shared: Stack, run: str, plain: Origin) -> None:
    wire, upstream = passing(shared.claim(run), plain)
    shared.claim(run)
    assert wire.is_reset()  # a third of a lease later at most
    assert upstream.is_reset()


@pytest.mark.parametrize("how", ["end", "stop"])
def test_a_run_that_ends_or_stops_ends_its_tunnels(shared: Stack, run: str, plain: Origin, how: str) -> None:
    attempt = shared.claim(run)
    wire, upstream = passing(attempt, plain)
    if how == "end":
        alone = Attempt(run, attempt.token, attempt.port)
        shared.end(alone, "done", 0)
    else:
        first = asked(attempt, "POST", plain.url("/mail"), b"Twiceshy-Step: one", body=b"1")
        plain.answer(OK)
        assert first.head().startswith(b"HTTP/1.1 200")
        refused(asked(attempt, "POST", plain.url("/other"), b"Twiceshy-Step: one", body=b"2"), 412, "diverged")
    assert wire.is_reset()
    assert upstream.is_reset()


@pytest.mark.check_all
def test_a_tunnel_holds_the_lease_of_a_run_without_a_token(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    with stack(dsn, tmp_path, config=routes, lease=0.6, idle_timeout=0.6) as made:
        attempt = Attempt(run, None, made.sidecar.port)
        wire, upstream = passing(attempt, plain)
        until = made.fetch("SELECT lease_expires_at AS at FROM twiceshy.run WHERE id = $1", run)[0]["at"]
        longer = "SELECT FROM twiceshy.run WHERE id = $1 AND lease_expires_at > $2::timestamptz + interval '1.5 s'"
        made.sandbox.wait_for(lambda: made.fetch(longer, run, until), what="it lasts longer than idle_timeout")
        wire.send(b"still")
        assert upstream.exactly(5) == b"still"
        wire.close()
        assert upstream.rest() == b""
        upstream.close()
        made.sandbox.wait_for(
            lambda: made.fetch("SELECT FROM twiceshy.attempt WHERE run_id = $1 AND outcome = 'failed'", run),
            what="idle_timeout",
        )


def test_a_tunnel_in_which_nothing_moves_is_ended(brief: Stack, run: str, plain: Origin) -> None:
    attempt = brief.claim(run)
    wire, upstream = passing(attempt, plain)
    assert wire.is_reset()
    assert upstream.is_reset()
    [hint] = attempt.report()["hints"]
    assert hint.startswith(f"localhost:{plain.port}: ")
    assert "0.5 s" in hint
    assert "tunnel_timeout" in hint


@pytest.mark.check_all
def test_nothing_leaves_while_nobody_knows_whose_it_is(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    """The database is away for longer than the lease is confirmed."""
    parts = urlsplit(dsn)
    with Cable(parts.port or 5432) as cable:
        far = urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{cable.port}"))
        with stack(far, tmp_path, config=routes, lease=0.6, database_wait=0.3) as made:
            made.dsn = dsn
            wire, upstream = passing(made.claim(run), plain)
            cable.refusing = True
            cable.reset()
            sent = 0
            with contextlib.suppress(ConnectionError):
                while True:  # until it is held, and then cut
                    wire.send(b"x")
                    sent += 1
                    threading.Event().wait(0.02)
            arrived = upstream.rest_of_cut()
            assert 0 < len(arrived) < sent
            assert "nobody could say whether its attempt is current" in made.sidecar.log.read_text()


def test_who_names_no_run_passes_where_that_is_allowed(brief: Stack, run: str, plain: Origin) -> None:
    nobody = Attempt(run, None, brief.sidecar.port)
    wire = connected(nobody, unopened(plain), bare=True)
    upstream = plain.accept()
    wire.send(b"1")
    assert upstream.exactly(1) == b"1"
    denied = Wire.to(nobody)
    denied.send(b"GET http://127.0.0.3/ HTTP/1.1\r\nHost: 127.0.0.3\r\n\r\n")
    refused(denied, 403, "denied")


# ---- nothing is left


@pytest.mark.parametrize("who", ["client", "upstream"])
@pytest.mark.parametrize("how", ["close", "reset", "die"])
def test_nothing_is_left_of_a_tunnel(shared: Stack, run: str, plain: Origin, who: str, how: str) -> None:
    attempt = shared.claim(run)
    pairs = [passing(attempt, plain) for _ in range(5)]
    assert connections(shared, plain) == 10
    for pair in pairs:
        one, other = pair if who == "client" else reversed(pair)
        if how == "die":
            one.send(b"x" * 300_000)  # of which nobody has read all
            other.exactly(1)
            other.send(b"y" * 1000)  # unread when it dies: its kernel resets the connection
        getattr(one, "reset" if how == "reset" else "close")()
        with contextlib.suppress(ConnectionResetError):
            other.rest()
        other.close()
    shared.sandbox.wait_for(lambda: connections(shared, plain) == 0, what="all is closed")


def test_nothing_is_left_of_a_killed_client_whose_upstream_stays(shared: Stack, run: str, plain: Origin) -> None:
    """It has closed, and its upstream has nothing to say and does not close: only its kernel knows that it is gone."""
    wire, upstream = passing(shared.claim(run), plain)
    wire.send(b"bye")
    wire.close()
    assert upstream.exactly(3) == b"bye"
    assert upstream.rest() == b""  # half an end
    upstream.send(b"late")  # what nobody takes: answered by a reset
    shared.sandbox.wait_for(lambda: connections(shared, plain) == 0, what="all is closed")
    upstream.close()


def test_the_sidecar_ends_with_blind_tunnels_open(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    wire, upstream = passing(attempt, plain)
    half = connected(attempt, unopened(plain))
    plain.accept()
    half.sock.shutdown(socket.SHUT_WR)
    shared.restart(kill=False)
    for each in (wire, upstream, half):
        with contextlib.suppress(ConnectionResetError):
            assert each.rest() == b""
    assert "Traceback" not in shared.sidecar.log.read_text()
