"""Workers with everything real: keeper, sidecar, Postgres, sandbox, agents, and processes that are SIGKILLed.

One keeper and one sidecar serve the whole module: agents change nothing of which sidecar is shared.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import time

import pytest

from tests.kill.launchers import until
from tests.kill.works import INPUT, Works

# ---- a worker at work


def test_a_worker_does_the_runs_that_are_started_some_at_a_time(works: Works) -> None:
    works.declare(
        'order(internal("GET", "/run")["input"]["n"]); until("go"); internal("PUT", "/result", {"by": sys.argv[1]})',
        input_schema='{ type = "object", required = ["n"] }',
    )
    started = [works.cli("start", "a", "--input", '{"n": 1}', "--key", f"{works.run_id}-k", "--json") for _ in range(2)]
    assert len({json.loads(each.stdout)["run"] for each in started}) == 1
    refused = works.cli("start", "a", "--input", '{"m": 1}')
    assert (refused.returncode, "'n' is a required property" in refused.stderr) == (2, True)
    runs = [json.loads(started[0].stdout)["run"], *works.queue("two", given=b'{"n": 2}')]
    runs += works.queue("three", agent="b", given=b'{"n": 3}')
    works.worker("--slots", "2")
    until(lambda: works.made("orders") == 2, "two agents have ordered")
    assert sorted(works.world.status(run) for run in runs) == ["queued", "running", "running"]
    works.touch("go")
    works.comes("done", *runs)
    assert works.made("orders") == 3
    results = [works.world.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] for run in runs]
    assert [json.loads(result)["by"] for result in results] == ["a", "a", "b"]


@pytest.mark.check_all
def test_a_run_that_fails_again_and_again_takes_nobodys_turn(works: Works) -> None:
    works.declare('sys.exit("no") if sys.argv[1] == "b" else write("done")')
    [bad] = works.queue("bad", agent="b")
    good = works.queue(*"1234")
    works.worker("--slots", "1", backoff=2)
    works.comes("done", *good)
    works.comes("failed", bad)
    assert works.world.outcomes(bad) == ["failed"] * 3
    order = works.world.fetch(
        "SELECT run_id FROM twiceshy.attempt WHERE run_id = ANY($1) ORDER BY started_at", [bad, *good]
    )
    assert [row["run_id"] for row in order[:2]] == [bad, good[0]]
    assert "3 attempts in a row brought no new step" in works.cli("runs", "--agent", "b").stdout


@pytest.mark.check_all
def test_an_attempt_that_takes_too_long_has_failed(works: Works) -> None:
    works.declare('write("x"); time.sleep(600)', attempt_timeout="1", max_attempts="1")
    runs = works.queue("slow")
    works.worker()
    works.comes("failed", *runs)
    assert works.world.outcomes(runs[0])[-1] == "died"
    error = works.world.fetch("SELECT error FROM twiceshy.run WHERE id = $1", runs[0])[0]["error"]
    assert "it took longer than attempt_timeout = 1" in error
    assert works.made("email") == 1


@pytest.mark.check_all
def test_an_attempt_that_is_idle_for_too_long_has_failed(works: Works) -> None:
    """Whether or not it has ever spoken. Calls, sleeps and waits are not idle, however long they take."""
    works.declare(
        """
if RUN.endswith("mute"): time.sleep(600)
write("x")
if RUN.endswith("hangs"): time.sleep(600)
internal("POST", "/sleep", {"seconds": 5})
permit = internal("POST", "/steps", {"name": "n"})
for _ in range(10):
    time.sleep(0.5)
    internal("POST", permit["finish"].removeprefix("http://twiceshy.internal") + "/heartbeat")
""",
        idle_timeout="2", max_attempts="1",
    )  # fmt: skip
    works.sandbox.fault(match={"path": "/email/send"}, times=0, delay=3)
    runs = works.queue("mute", "hangs", "works")
    works.worker(hold=60)
    works.comes("failed", *runs[:2])
    works.comes("done", runs[2])
    for run in runs[:2]:
        assert "it made no request, step or heartbeat for idle_timeout = 2 s" in works.error(run)
    assert [set(works.world.outcomes(run)) for run in runs] == [{"died"}, {"died"}, {"done"}]


@pytest.mark.check_all
def test_a_worker_that_could_start_nothing_says_so(works: Works) -> None:
    works.declare("")
    none = works.cli("worker", "--agent", "c")
    assert (none.returncode, "there are a, b, refund" in none.stderr) == (2, True)
    works.config.write_text('[agents.a]\ncommand = ["no-such-program"]\n')
    none = works.cli("worker")
    assert (none.returncode, "agent a: cannot start 'no-such-program'" in none.stderr) == (2, True)


# ---- a worker that dies


def test_the_next_worker_goes_on_where_a_killed_one_was(works: Works) -> None:
    works.declare('write("before"); started(); until("go"); write("after")')
    runs = works.queue("one", "two")
    first = works.worker()
    until(lambda: works.made("email") == 2, "both have written")
    first.kill()
    first.wait()
    until(lambda: not works.agents(), "its agents die with it")
    works.touch("go")
    # The lease lasts 30 s: within that, only a lock tells.
    works.worker()
    works.comes("done", *runs, seconds=25)
    assert [works.world.outcomes(run) for run in runs] == [["died", "done"]] * 2
    assert works.mails() == sorted((run, text) for run in runs for text in ("before", "after"))
    until(lambda: len(list((works.world.home / "workers").glob("*.lock"))) == 1, "the dead one's file is gone")


@pytest.mark.check_all
def test_a_worker_that_was_stopped_past_its_leases_changes_nothing(works: Works) -> None:
    works.declare('write("before"); until("go"); write("after"); internal("PUT", "/result", turn)')
    [run] = works.queue("one")
    first = works.worker(lease=2)
    until(lambda: works.made("email") == 1, "it has written")
    first.send_signal(signal.SIGSTOP)
    works.worker(lease=2)
    until(lambda: works.world.outcomes(run)[:1] == ["died"], "the lease is over")
    until(lambda: works.starts == 2, "another agent is started")
    works.touch("go")
    works.comes("done", run)
    first.send_signal(signal.SIGCONT)
    until(lambda: not works.agents(), "the old agent is ended")
    until(lambda: "is not ours any more" in works.logs[first.pid].read_text(), "and the worker says so")
    assert first.poll() is None
    assert works.world.status(run) == "done"
    assert works.world.outcomes(run) == ["died", "done"]
    assert works.world.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] == b"2"
    assert works.mails() == [(run, "after"), (run, "before")]


@pytest.mark.check_all
def test_all_agents_of_a_worker_are_started_again_when_their_sidecar_was_replaced(works: Works) -> None:
    works.declare('write("before"); until("go"); write("after")')
    runs = works.queue("one", "two", "three")
    works.worker()
    until(lambda: works.made("email") == 3, "all have written")
    os.kill(works.world.sidecar, signal.SIGKILL)
    until(lambda: works.starts == 6, "all were started again")
    works.touch("go")
    works.comes("done", *runs)
    assert [works.world.outcomes(run) for run in runs] == [["handed_over", "done"]] * 3
    assert works.mails() == sorted((run, text) for run in runs for text in ("before", "after"))


# ---- how it hears of work


@pytest.mark.check_all
@pytest.mark.parametrize("pooled", [False, True])
def test_a_start_is_heard_of_at_once_and_through_a_pooler_at_the_next_look(works: Works, pooled: bool) -> None:
    works.declare('write("x")')
    more = {}
    if pooled:
        # A database of another name has a folder of its own.
        more = {"DATABASE_URL": f"{works.world.dsn}?statement_cache_size=0"}
        more["TWICESHY_HOME"] = str(works.world.home.parent / "pooled")
    worker = works.worker(poll=0.2 if pooled else 600, more=more)
    until(lambda: "at a time" in works.logs[worker.pid].read_text(), "it looks for work")
    runs = works.queue("one")
    works.comes("done", *runs, seconds=30)
    runs += works.queue("two", "three")
    works.comes("done", *runs, seconds=30)
    worker.send_signal(signal.SIGTERM)
    assert works.ends(worker) == 0


@pytest.mark.check_all
def test_a_run_that_waits_holds_no_slot(works: Works) -> None:
    works.declare(
        'write("before"); internal("POST", "/sleep", {"seconds": 8}) if sys.argv[1] == "a" else 0; write("after")'
    )
    [sleeper] = works.queue("sleeps")
    works.worker("--slots", "1", hold=0.2, park_quiet=0.2)
    works.comes("parked", sleeper)
    until(lambda: not works.agents(), "its agent is ended")
    [other] = works.queue("other", agent="b")
    works.comes("done", other)
    works.comes("done", sleeper)
    assert works.world.outcomes(sleeper) == ["parked", "done"]
    assert works.mails() == sorted((run, text) for run in (sleeper, other) for text in ("before", "after"))


# ---- a worker that is told to stop


def test_a_stopping_worker_lets_its_agents_finish_and_takes_no_more(works: Works) -> None:
    works.declare('write("before"); until("go"); write("after")')
    [one, two] = works.queue("one", "two")
    worker = works.worker("--slots", "1")
    until(lambda: works.made("email") == 1, "it has written")
    worker.send_signal(signal.SIGTERM)
    until(lambda: "stops; one agent goes on" in works.logs[worker.pid].read_text(), "it says that it stops")
    works.touch("go")
    assert works.ends(worker) == 0
    assert (works.world.status(one), works.world.status(two)) == ("done", "queued")


@pytest.mark.parametrize("twice", [pytest.param(False, marks=pytest.mark.check_all), True])
def test_what_does_not_end_in_time_is_interrupted_and_goes_on_elsewhere(works: Works, twice: bool) -> None:
    works.declare('write("before"); until("go"); write("after")')
    [run] = works.queue("one")
    worker = works.worker("--drain-agents", "60" if twice else "0.1")
    until(lambda: works.made("email") == 1, "it has written")
    worker.send_signal(signal.SIGTERM)
    if twice:
        until(lambda: "stops; one agent goes on" in works.logs[worker.pid].read_text(), "it says that it stops")
        worker.send_signal(signal.SIGTERM)
    assert works.ends(worker) == (128 + signal.SIGTERM if twice else 0)
    assert works.agents() == []
    assert (works.world.status(run), works.world.outcomes(run)) == ("queued", ["interrupted"])
    works.touch("go")
    works.worker()
    works.comes("done", run)
    assert works.mails() == [(run, "after"), (run, "before")]
    assert works.world.fetch("SELECT barren FROM twiceshy.run WHERE id = $1", run)[0]["barren"] == 0


# ---- what a person decides


def test_cancelling_ends_the_agent_and_nothing_else(works: Works) -> None:
    works.declare('write("before"); until(RUN); write("after")')
    [one, two] = works.queue("one", "two")
    works.worker()
    until(lambda: works.made("email") == 2, "both have written")
    told = works.cli("cancel", one, "--json")
    assert json.loads(told.stdout) == {"run": one, "status": "cancelled", "was": "running"}
    until(lambda: len(works.agents()) == 1, "its agent is ended")
    works.touch(two)
    works.comes("done", two)
    assert (works.world.status(one), works.world.outcomes(one)) == ("cancelled", ["cancelled"])
    assert works.cli("cancel", one).stdout == f"run {one} was cancelled before\n"
    [three] = works.queue("three")
    works.touch(three)
    works.comes("done", three)


@pytest.mark.check_all
def test_a_failed_run_goes_on_from_its_journal_when_it_is_retried(works: Works) -> None:
    works.declare('write("before")\nif not os.path.exists(f"{HERE}/mended"): sys.exit(3)\nwrite("after")')
    [run] = works.queue("one")
    works.worker()
    works.comes("failed", run)
    works.touch("mended")
    assert works.cli("retry", run).stdout == f"run {run} is queued; a worker goes on with it\n"
    works.comes("done", run)
    assert works.mails() == [(run, "after"), (run, "before")]
    again = works.cli("retry", run)
    assert (again.returncode, "is done: start another" in again.stderr) == (1, True)


@pytest.mark.check_all
def test_cancelling_a_run_in_a_terminal_ends_its_launcher(works: Works) -> None:
    works.agent(INPUT + 'write("before"); until("never")')
    launcher = works.launch()
    until(lambda: works.made("email") == 1, "it has written")
    assert works.cli("cancel", works.run_id).returncode == 0
    code, _, err = works.end(launcher)
    assert (code, "cancelled" in err) == (4, True)
    assert works.agents() == []
    assert works.outcomes == ["cancelled"]
    told = works.cli("retry", works.run_id)
    assert f"to go on: twiceshy run --run {works.run_id}" in told.stdout
    assert works.world.status(works.run_id) == "queued"


# ---- many


@pytest.mark.check_all
def test_whoever_dies_every_mail_is_written_once(works: Works) -> None:
    """Every third death is a worker's, the others agents'; by a seed, so that one that fails can be tried again."""
    chance = random.Random(20261130)
    works.declare(
        'write("first"); time.sleep(0.2); write("second"); time.sleep(0.2); write("third")', max_attempts="100"
    )
    runs = works.queue(*map(str, range(24)))
    workers = [works.worker("--slots", "2") for _ in range(3)]
    deaths = {"worker": 0, "agent": 0}
    deadline = time.monotonic() + 300
    for turn in itertools.count(1):
        if {works.world.status(run) for run in runs} == {"done"}:
            break
        assert time.monotonic() < deadline, {run: works.world.outcomes(run) for run in runs}
        if turn % 3 == 0 and deaths["worker"] < 12:
            n = chance.randrange(len(workers))
            workers[n].kill()
            workers[n].wait()
            workers[n] = works.worker("--slots", "2")
            deaths["worker"] += 1
        elif (living := works.agents()) and deaths["agent"] < 60:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(living), signal.SIGKILL)
                deaths["agent"] += 1
        time.sleep(0.3)
    assert works.mails() == sorted((run, text) for run in runs for text in ("first", "second", "third"))
    assert min(deaths.values()) > 0
