"""What the queue promises, at its full size: nothing is done twice, nobody is taken for dead early, nothing is left."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import queue
from runtime.database import Connection
from runtime.embedded import Postgres
from sandbox.client import Sandbox
from tests.apart import ask_database
from tests.conftest import _still_keeping, scratch
from tests.kill.launchers import World, until
from tests.kill.postgres import own_postgres
from tests.kill.works import Works

pytestmark = pytest.mark.check_all


def orphan(works: Works, lease: float) -> int:
    """All queued runs are claimed by a worker of another host, which dies at once. How many."""

    async def work(connection: Connection) -> int:
        count = 0
        while await queue.claim_next(connection, ["a"], worker="gone", host="elsewhere", folder="/state", lease=lease):
            count += 1
        return count

    return ask_database(works.world.dsn, work)


def held_by_the_dead(works: Works) -> int:
    found = works.world.fetch(
        "SELECT count(*) AS n FROM twiceshy.attempt t JOIN twiceshy.run u ON u.id = t.run_id AND u.attempt = t.n "
        "WHERE t.process = 'gone' AND u.status = 'running'"
    )
    return int(found[0]["n"])


def test_orphans_are_begun_once_by_two_workers_that_start_at_once_in_twenty_rounds(works: Works) -> None:
    works.declare_function("\ndef work(given):\n    write('first')\n    write('second')\n")
    for turn in range(20):
        runs = works.queue(*(f"{turn}-{n}" for n in range(100)))
        assert orphan(works, lease=0.5) == 100
        workers = [works.worker("--slots", "4", lease=6) for _ in range(2)]
        works.comes("done", *runs, seconds=200)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert works.ends(worker) == 0
        mine = sorted(mail for mail in works.mails() if mail[0] in runs)
        assert mine == sorted((run, text) for run in runs for text in ("first", "second")), f"round {turn}"
        attempts = works.world.fetch("SELECT outcome FROM twiceshy.attempt WHERE run_id = ANY($1)", runs)
        assert sorted(row["outcome"] for row in attempts) == ["died"] * 100 + ["done"] * 100, works.said()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with own_postgres() as made:
        yield made


@pytest.fixture
def works_there(postgres: Postgres, tmp_path: Path, run: str) -> Iterator[Works]:
    """Works on a server of their own."""
    with scratch("ts-") as home, Sandbox.start(home / "sandbox.log") as sandbox:
        world = World(postgres.dsn, home / "state", sandbox, lease="1")
        made = Works(world, tmp_path, run)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.communicate()
            world.close()
            left = _still_keeping(home, patience=20.0)
        assert not left


def test_a_postgres_that_crashes_in_the_middle_of_a_recovery_loses_nobody(
    postgres: Postgres, works_there: Works
) -> None:
    works = works_there
    works.declare_function("\ndef work(given):\n    pass\n")
    runs = works.queue(*map(str, range(250)))
    assert orphan(works, lease=1.0) == 250
    works.worker("--slots", "1", lease=1, poll=0.1)
    until(lambda: held_by_the_dead(works) < 250, "the recovery has begun")
    assert postgres.pid is not None
    os.kill(postgres.pid, signal.SIGQUIT)  # as `pg_ctl stop -m immediate` does
    until(lambda: postgres.poll() is not None, "Postgres has crashed")
    time.sleep(2.0)
    postgres.spawn()
    until(postgres.ready, "Postgres is back")
    assert held_by_the_dead(works) > 0
    until(lambda: held_by_the_dead(works) == 0, "none is left", 2 * 1.0 + 10)
    standing = works.world.fetch("SELECT count(*) AS n FROM twiceshy.run WHERE status IN ('queued', 'running', 'done')")
    assert standing[0]["n"] == len(runs)


def clock(ahead: str) -> dict[str, str]:
    """What gives a process a clock that is *ahead*. (The command itself stays between, and is killed in its place.)"""
    told = subprocess.run(["faketime", "-f", ahead, "env"], capture_output=True, text=True, check=True).stdout
    variables = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    return {name: variables[name] for name in ("LD_PRELOAD", "FAKETIME")}


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not here: no worker has a clock of its own")
def test_a_worker_whose_clock_is_ahead_takes_nothing_over_early(works: Works) -> None:
    works.declare("write('begun'); until(RUN)")
    [held] = works.queue("held")
    works.worker("--slots", "1", lease=4)
    until(lambda: works.made("email") == 1, "the first has its run")
    # Of another folder: no lock tells it who lives.
    elsewhere = {"TWICESHY_HOME": str(works.world.home.parent / "ahead")}
    works.worker("--slots", "4", lease=4, more=elsewhere | clock("+10m"))
    others = works.queue("one", "two", "three")
    until(lambda: works.made("email") == 4, "the one with the clock has taken what is queued")
    time.sleep(6.0)  # longer than a lease: it has looked for silent ones in earnest
    assert works.world.outcomes(held) == [None]
    for run in (held, *others):
        works.touch(run)
    works.comes("done", held, *others)
    assert {tuple(works.world.outcomes(run)) for run in (held, *others)} == {("done",)}
    assert works.mails() == sorted((run, "begun") for run in (held, *others))


def test_a_call_of_ten_leases_is_not_taken_for_a_dead_agent(works: Works) -> None:
    works.declare(
        """
chat = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": RUN}]}
call("POST", "/v1/chat/completions", chat)
"""
    )
    works.sandbox.fault(match={"path": "/v1/chat/completions"}, delay=20)
    [run] = works.queue("one")
    works.worker(lease=2)
    until(lambda: works.made("llm") == 1, "it has called")
    works.worker(lease=2)
    works.worker(lease=2, more={"TWICESHY_HOME": str(works.world.home.parent / "other")})
    works.comes("done", run)
    assert works.world.outcomes(run) == ["done"]
    assert works.made("llm") == 1


def test_runs_that_crash_again_and_again_take_nobodys_turn_whatever_their_priority(works: Works) -> None:
    works.declare('os.kill(os.getpid(), 9) if sys.argv[1] == "b" else write("done")', max_attempts="8")
    bad = works.queue(*(f"bad-{n}" for n in range(4)), agent="b", priority=10)
    good = works.queue(*(f"good-{n}" for n in range(8)))
    works.worker("--slots", "1", backoff=1)
    works.comes("done", *good)
    assert {works.world.status(run) for run in bad} <= {"queued", "running"}
    works.comes("failed", *bad, seconds=300)
    assert {len(works.world.outcomes(run)) for run in bad} == {8}
