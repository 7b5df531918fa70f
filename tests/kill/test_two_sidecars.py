"""Two sidecars on one database, and whoever stood still past his lease: nothing of his reaches an upstream.

Leases of a second, by the database's clock; what stands still is SIGSTOPped at a fail point.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import runs
from runtime.database import Connection
from runtime.errors import Held
from sandbox.client import Sandbox
from tests.apart import ask_database
from tests.conftest import fresh_database
from tests.kill.launchers import Bench, World, until
from tests.kill.test_matrix import KINDS, stands_still
from tests.stack import Attempt, SidecarProcess, Stack, stack

LEASE = 1.0


@pytest.fixture(scope="module")
def two(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("two"), lease=LEASE, poll=0.1) as made:
            yield made


@pytest.fixture
def other(two: Stack, tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar as on another machine: no lock tells it who is dead."""
    made = SidecarProcess(two.dsn, tmp_path / "other", **two.settings)
    yield made
    made.stop()


def take_over(dsn: str, run: str) -> str:
    """Claim *run* from another machine, as soon as its owner is silent for long enough. The token."""

    async def work(connection: Connection) -> str:
        while True:
            try:
                claim = await runs.claim_silent(
                    connection, run, kind="launcher", host="elsewhere", folder="/elsewhere", lease=LEASE
                )
                return claim.token
            except Held as error:
                await asyncio.sleep(error.wait)

    return ask_database(dsn, work)


def armed(made: Stack, point: str) -> None:
    made.settings["failpoint"] = f"{point}:pause"
    made.restart(kill=False)
    del made.settings["failpoint"]
    made.mark()


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("before-first-byte", "keyless"),
        *(
            pytest.param(point, kind, marks=pytest.mark.check_all)
            for point, kind in (
                ("intent-written", "keyed"), ("intent-written", "keyless"), ("intent-written", "model"),
                ("before-first-byte", "keyed"), ("before-first-byte", "read"),
                ("before-intent", "keyless"), ("read-whole", "read"),
            )
        ),
    ],
)  # fmt: skip
def test_a_sidecar_that_stood_still_past_its_lease_sends_nothing(
    two: Stack, other: SidecarProcess, run: str, point: str, kind: str
) -> None:
    asked = KINDS[kind]
    armed(two, point)
    zombie = two.claim(run)
    waiting = zombie.in_background(asked.method, two.url(asked.path), asked.body)
    until(lambda: stands_still(two.sidecar.process.pid), f"the sidecar stands still at {point}")
    successor = Attempt(run, take_over(two.dsn, run), other.port)
    reply = successor.ask(asked.method, two.url(asked.path), asked.body)
    if kind == "keyless" and point != "before-intent":
        # Whether it had left the machine that is gone, nobody here can know.
        assert (reply.status, reply.error) == (424, "ambiguous"), reply.body
    else:
        assert reply.status // 100 == 2
    before = [(each.n, each.target) for each in two.received()]
    two.sidecar.process.send_signal(signal.SIGCONT)
    waiting.thread.join(30)
    assert waiting.reply is None or waiting.reply.status in (423, 503), waiting.reply
    # It has had its say: what it would send would have come by now.
    for method, path in (("POST", "/email/send"), ("GET", "/any/later")):
        late = zombie.ask(method, two.url(path), {"to": "a", "text": "b"} if method == "POST" else None)
        assert late.status in (423, 424), late
    assert [(each.n, each.target) for each in two.received()] == before


@pytest.mark.check_all
def test_an_exchange_of_a_sidecar_that_is_alive_is_waited_for(two: Stack, other: SidecarProcess, run: str) -> None:
    """It draws breath, so its answer is waited for, however long; its lease runs on meanwhile."""
    two.restart(kill=False)
    two.mark()
    two.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    first = two.claim(run)
    first.send("POST", two.url("/email/send"), KINDS["keyless"].body)
    two.sandbox.wait_held("slow")
    first.die()
    second = Attempt(run, take_over(two.dsn, run), other.port)
    waiting = second.in_background("POST", two.url("/email/send"), KINDS["keyless"].body)
    # Longer than a lease: who had died would have been judged dead by now.
    until(lambda: renewed(two, 2), "both sidecars have renewed their lease")
    assert waiting.thread.is_alive()
    two.sandbox.release("slow")
    assert (waiting.result().status, waiting.result().replayed) == (202, True)
    assert len(two.received("email")) == 1


def renewed(made: Stack, lives: int) -> bool:
    """The first sidecar's lease ends later than *lives* leases after it began to be watched."""
    [row] = made.fetch(
        "SELECT expires_at > started_at + make_interval(secs => $2) AS late FROM twiceshy.sidecar WHERE id = $1",
        made.sidecar.id, LEASE * (1 + lives),
    )  # fmt: skip
    return bool(row["late"])


def test_an_answer_that_comes_late_settles_what_was_ambiguous(two: Stack, other: SidecarProcess, run: str) -> None:
    """The sidecar stood still with the answer in its hands; a person had not yet said anything."""
    armed(two, "before-record")
    first = two.claim(run)
    first.in_background("POST", two.url("/email/send"), KINDS["keyless"].body)
    until(lambda: stands_still(two.sidecar.process.pid), "the sidecar stands still before it records")
    second = Attempt(run, take_over(two.dsn, run), other.port)
    stopped = second.ask("POST", two.url("/email/send"), KINDS["keyless"].body)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert two.end(second, "failed") == "ambiguous"
    two.sidecar.process.send_signal(signal.SIGCONT)
    until(lambda: status(two, run) == "queued", "the late answer settles it")
    third = two.claim(run)
    third.port = other.port
    reply = third.ask("POST", two.url("/email/send"), KINDS["keyless"].body)
    assert (reply.status, reply.replayed) == (202, True)
    assert len(two.received("email")) == 1


def status(made: Stack, run: str) -> str:
    return str(made.fetch("SELECT status FROM twiceshy.run WHERE id = $1", run)[0]["status"])


# ---- agent and launcher stood still


AGENT = """
order()
open(HERE + "/ordered", "w").close()
until("go on")
for method, path, body in (("GET", "/pantry", None), ("GET", "/any/read", None), ("POST", "/any/late", {"a": 1})):
    try:
        call(method, path, body)
    except Exception as error:
        print(getattr(error, "code", error), flush=True)
"""


def test_agent_and_launcher_that_stood_still_past_their_lease(
    dsn: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their run was taken over. When they go on, not even a read of theirs goes out, and the agent is ended."""
    monkeypatch.setenv("TWICESHY_LEASE", str(LEASE))
    with Sandbox.start(tmp_path / "sandbox.log") as sandbox:
        world = World(dsn, home / "state", sandbox)
        try:
            bench = Bench(world, tmp_path, "stood-still")
            bench.agent(AGENT)
            launcher = bench.launch()
            until((tmp_path / "ordered").exists, "it has ordered")
            stopped = [*bench.agents(), launcher.pid]
            for pid in reversed(stopped):  # the launcher first: it must not see its agent stop
                os.kill(pid, signal.SIGSTOP)
            take_over(dsn, "stood-still")
            before = len(sandbox.requests())
            bench.touch("go on")
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            code, out, err = bench.end(launcher)
            assert code == 75, (out, err)
            assert "another attempt" in err
            until(lambda: not bench.agents(), "the agent is ended")
            assert len(sandbox.requests()) == before
            assert set(out.split()) <= {"423"}
        finally:
            world.close()
