"""The crash matrix: every fail point × who dies there × what was asked. Beside each cell stands what must be seen.

A sidecar stands still at the point (or dies there), the victim is SIGKILLed, what is left goes on, and the agent starts
again from the top. A cell is the number of requests that the upstream received in the end:

    1    the first one was enough                        .    this kind never comes to the point
    2    it was sent again                               1+   one; two where the sidecar had not yet seen the end
    0?   nothing had left, which nobody can know: the run stops as ambiguous, a person says send_again, and it is 1
    1?   it had arrived, which nobody can know: ambiguous, a person says assume_done, and it stays 1

Whatever the cell: an order is made once and under one key, a mail is sent once, and once the run is done another
attempt gets the same bytes without a request upstream.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.embedded import Postgres
from runtime.failpoints import POINTS
from tests.kill.launchers import until
from tests.kill.postgres import own_postgres
from tests.stack import Attempt, Reply, Stack, stack
from tests.tunnelled import Secure, trusting


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of request: how it is asked, and which of the sandbox's services does it."""

    method: str
    path: str
    body: dict[str, Any] | None
    service: str
    effect: bool = False


CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
KINDS = {
    "read": Kind("GET", "/any/read", None, "any"),
    "keyed": Kind("POST", "/orders", {"lines": [{"sku": "tea", "n": 1}], "total": 5}, "orders", effect=True),
    "keyless": Kind("POST", "/email/send", {"to": "a@example.org", "subject": "s", "text": "t"}, "email", effect=True),
    "model": Kind("POST", "/v1/chat/completions", CHAT, "llm"),
    "stream": Kind("POST", "/v1/chat/completions", {**CHAT, "stream": True}, "llm"),
}

MATRIX = {
    "sidecar": """
                        read    keyed   keyless model   stream
    claimed             1       1       1       1       1
    read-whole          1       1       1       1       1
    before-intent       .       1       1       1       1
    intent-written      .       1       0?      1       1
    before-first-byte   1       1       0?      1       1
    request-written     2       2       1?      2       2
    head-received       2       2       1?      2       2
    half-streamed       2       2       1?      2       2
    marker-seen         .       .       .       .       2
    end-held            2       2       1?      2       2
    before-record       2       2       1?      2       2
    recorded            1       1       1       1       1
    delivered           1       1       1       1       1
    """,
    "agent": """
                        read    keyed   keyless model   stream
    claimed             1+      1       1       1       1
    read-whole          1+      1       1       1       1
    before-intent       .       1       1       1       1
    intent-written      .       1       1       1       1
    before-first-byte   1+      1       1       1       1
    request-written     1+      1       1       1       1
    head-received       1+      1       1       1       1
    half-streamed       1+      1       1       1       1
    marker-seen         .       .       .       .       1
    end-held            1+      1       1       1       1
    before-record       1+      1       1       1       1
    recorded            1       1       1       1       1
    delivered           1       1       1       1       1
    """,
    "postgres": """
                        read    keyed   keyless model   stream
    claimed             1       1       1       1       1
    read-whole          1       1       1       1       1
    before-intent       .       1       1       1       1
    intent-written      .       1       1       1       1
    before-first-byte   1       1       1       1       1
    request-written     1       1       1       1       1
    head-received       1       1       1       1       1
    half-streamed       1       1       1       1       1
    marker-seen         .       .       .       .       1
    end-held            1       1       1       1       1
    before-record       1       1       1       1       1
    recorded            1       1       1       1       1
    delivered           1       1       1       1       1
    """,
}


@dataclass(frozen=True, slots=True)
class Cell:
    victim: str
    point: str
    kind: str
    expected: str
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.victim}-{self.point}-{self.kind}{'-tls' if self.tls else ''}"


def read_matrix() -> Iterator[Cell]:
    for victim, text in MATRIX.items():
        kinds, *rows = [line.split() for line in text.strip().splitlines()]
        for point, *cells in rows:
            for kind, expected in zip(kinds, cells, strict=True):
                if expected != ".":
                    yield Cell(victim, point, kind, expected)


CELLS = list(read_matrix())
#: Over TLS once for each kind; the sidecar's way from the recorded answer to its upstream is the same.
SECURE = [Cell("sidecar", "before-record", kind, {"keyless": "1?"}.get(kind, "2"), tls=True) for kind in KINDS]
#: In `make test`: a few of them.
QUICK = {
    f"{victim}-{point}-{kind}"
    for victim, point, kind in (
        ("sidecar", "intent-written", "keyless"), ("sidecar", "before-record", "keyed"),
        ("sidecar", "marker-seen", "stream"), ("postgres", "before-record", "keyless"),
    )
}  # fmt: skip


def test_every_point_is_in_a_cell() -> None:
    for victim in MATRIX:
        assert {cell.point for cell in CELLS if cell.victim == victim} == set(POINTS)


# ---- the world


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with own_postgres() as made:
        yield made


def world(postgres: Postgres, folder: Path, *, tls: bool) -> Iterator[Stack]:
    with stack(postgres.dsn, folder, tls=tls, poll=0.1, database_wait=20) as made:
        yield made


@pytest.fixture(scope="module")
def plain(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from world(postgres, tmp_path_factory.mktemp("plain"), tls=False)


@pytest.fixture(scope="module")
def secure(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from world(postgres, tmp_path_factory.mktemp("secure"), tls=True)


def start(made: Stack, failpoint: str) -> None:
    """A fresh sidecar that is armed; those after it are not."""
    made.settings["failpoint"] = failpoint
    made.restart(kill=False)
    del made.settings["failpoint"]
    made.mark()


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def claim(made: Stack, run: str, *, tls: bool) -> Attempt | Secure:
    attempt = made.claim(run)
    return Secure.of(attempt, made, trusting(made)) if tls else attempt


def ask(made: Stack, attempt: Attempt | Secure, kind: Kind) -> Reply | None:
    """The answer, None where none came whole."""
    url = kind.path if isinstance(attempt, Secure) else made.url(kind.path)
    with contextlib.suppress(OSError, ValueError):
        reply = attempt.ask(kind.method, url, kind.body)
        return None if reply.cut or reply.status >= 500 else reply
    return None


def kill(made: Stack, postgres: Postgres, cell: Cell, first: Attempt | Secure) -> None:
    """The victim dies at the point, and what is left goes on."""
    sidecar = made.sidecar.process
    if cell.victim == "sidecar":
        until(lambda: sidecar.poll() is not None, f"the sidecar dies at {cell.point}")
        made.restart()
        first.die()
        return
    until(lambda: stands_still(sidecar.pid), f"the sidecar stands still at {cell.point}")
    if cell.victim == "agent":
        first.die()
    else:
        assert postgres.pid is not None
        os.killpg(postgres.pid, signal.SIGKILL)
        until(lambda: postgres.poll() is not None, "Postgres is gone")
    sidecar.send_signal(signal.SIGCONT)
    if cell.victim == "postgres":
        postgres.spawn()
        until(postgres.ready, "Postgres is back")


def play(made: Stack, postgres: Postgres, cell: Cell) -> None:
    kind, run = KINDS[cell.kind], str(cell)
    start(made, f"{cell.point}:{'kill' if cell.victim == 'sidecar' else 'pause'}")
    first = claim(made, run, tls=cell.tls)
    url = kind.path if isinstance(first, Secure) else made.url(kind.path)
    asking = first.in_background(kind.method, url, kind.body)
    kill(made, postgres, cell, first)
    reply = None
    if cell.victim == "postgres":
        # The agent is alive, and waits.
        asking.thread.join(40)
        reply = asking.reply
        if reply is not None and (reply.cut or reply.status >= 500):
            reply = None
        if reply is None:
            first.die()
    attempt = first
    if reply is None:
        attempt = claim(made, run, tls=cell.tls)
        reply = ask(made, attempt, kind)
    assert reply is not None

    if cell.expected.endswith("?"):
        assert (reply.status, reply.error) == (424, "ambiguous"), reply
        assert len(made.received(kind.service)) == int(cell.expected[0])
        made.end(attempt, "failed")
        made.resolve(run, reply.step, "send_again" if cell.expected == "0?" else "assume_done")
        attempt = claim(made, run, tls=cell.tls)
        reply = ask(made, attempt, kind)
        assert reply is not None
    assert reply.status // 100 == 2, (reply.status, reply.body)

    made.end(attempt, "died")
    again = claim(made, run, tls=cell.tls)
    replayed = ask(made, again, kind)
    assert replayed is not None and replayed.replayed
    assert replayed.body == reply.body
    assert made.end(again, "done", 0) == "done"

    received = made.received(kind.service)
    hits = {"0?": {1}, "1?": {1}, "1+": {1, 2}}.get(cell.expected) or {int(cell.expected)}
    assert len(received) in hits
    if kind.effect:
        assert len(made.effects(kind.service)) == 1
        assert len({each.header("idempotency-key") for each in received}) == 1


@pytest.mark.parametrize("cell", [cell for cell in CELLS if str(cell) in QUICK], ids=str)
def test_a_cell(plain: Stack, postgres: Postgres, cell: Cell) -> None:
    play(plain, postgres, cell)


@pytest.mark.check_all
@pytest.mark.parametrize("cell", [cell for cell in CELLS if str(cell) not in QUICK], ids=str)
def test_every_other_cell(plain: Stack, postgres: Postgres, cell: Cell) -> None:
    play(plain, postgres, cell)


@pytest.mark.check_all
@pytest.mark.parametrize("cell", SECURE, ids=str)
def test_over_tls(secure: Stack, postgres: Postgres, cell: Cell) -> None:
    play(secure, postgres, cell)
