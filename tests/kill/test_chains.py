"""Runs that start others, or go on as others: nobody holds a process meanwhile, and nothing is done twice."""

import os
import signal

import pytest

from runtime import approvals, events
from tests.apart import ask_database
from tests.kill.launchers import Bench, until
from tests.kill.works import INPUT, Works

WORLD = {"hold": "0.2", "park_quiet": "0.4"}

#: The agent "a" has each of three "b" order once, and ends with what they have put.
PARENT = """
if sys.argv[1] == "b":
    n = internal("GET", "/run")["input"]
    until("go")
    order(n)
    internal("PUT", "/result", n * n)
    sys.exit()
children = [internal("POST", "/runs", {"agent": "b", "input": n})["run"] for n in (1, 2, 3)]
ends = [internal("POST", f"/runs/{child}/wait") for child in children]
internal("PUT", "/result", [end["result"] for end in ends])
"""


def children(works: Works, parent: str) -> list[str]:
    rows = works.world.fetch("SELECT id FROM twiceshy.run WHERE parent = $1 ORDER BY created_at", parent)
    return [row["id"] for row in rows]


def test_a_parent_parks_until_its_children_have_ended(works: Works) -> None:
    works.declare(PARENT, children='["b"]')
    [parent] = works.queue("p")
    works.worker("--slots", "2")
    until(lambda: works.world.status(parent) == "parked", "the parent is parked")
    found = children(works, parent)
    assert len(found) == 3
    works.touch("go")
    works.comes("done", parent, *found)
    assert works.result(parent) == [1, 4, 9]
    assert works.made("orders") == 3
    assert works.world.outcomes(parent)[-2:] == ["parked", "done"]


@pytest.mark.check_all
def test_whoever_is_killed_each_child_is_started_once(works: Works) -> None:
    works.declare(PARENT, children='["b"]')
    parents = works.queue(*"pqr")
    workers = [works.worker("--slots", "2", max_attempts=50) for _ in range(2)]
    for n in range(8):
        until(works.agents, "an agent is there")
        for pid in works.agents()[n % 3 :: 3]:
            works.shell(f"kill -9 {pid}")
        if n % 3 == 2:
            os.kill(workers[n % 2].pid, signal.SIGKILL)
            workers[n % 2].wait()
            workers[n % 2] = works.worker("--slots", "2", max_attempts=50)
        if n == 4:
            works.touch("go")
        if all(works.world.status(parent) == "done" for parent in parents):
            break
    works.touch("go")
    works.comes("done", *parents)
    for parent in parents:
        assert works.result(parent) == [1, 4, 9]
        assert len(children(works, parent)) == 3
    assert works.made("orders") == 9


@pytest.mark.check_all
def test_cancelling_the_parent_ends_all(works: Works) -> None:
    works.declare(PARENT, children='["b"]')
    [parent] = works.queue("p")
    works.worker("--slots", "4")
    until(lambda: works.world.status(parent) == "parked" and len(works.agents()) == 3, "the children are at work")
    assert works.cli("cancel", parent).returncode == 0
    works.comes("cancelled", parent, *children(works, parent))
    until(lambda: not works.agents(), "no agent is left")
    assert works.made("orders") == 0


#: Waits for an event, then for a decision, then for a child; "b" is that child.
WAITS = """
if sys.argv[1] == "b":
    sys.exit()
internal("POST", "/events/go/wait")
internal("POST", "/approvals/boss/wait")
child = internal("POST", "/runs", {"agent": "b"})["run"]
internal("PUT", "/result", internal("POST", f"/runs/{child}/wait")["status"])
"""


@pytest.mark.check_all
def test_who_listens_takes_up_what_wakes_at_once(works: Works) -> None:
    """Nobody looks but once in ten minutes."""
    works.declare(WAITS, children='["b"]')
    [run] = works.queue("w")
    works.worker("--slots", "1", poll=600)
    until(lambda: works.world.status(run) == "parked", "it waits for the event")
    ask_database(works.world.dsn, events.send, run, "go", b"1", limit=10)
    until(lambda: works.world.fetch("SELECT FROM twiceshy.approval WHERE run_id = $1", run), "it asks")
    until(lambda: works.world.status(run) == "parked", "it waits for the decision")
    ask_database(works.world.dsn, approvals.decide, run, "boss", "approve")
    works.comes("done", run)
    assert works.result(run) == "done"


# ---- continue as new

#: Orders once for each run of its chain, and puts a result in the third. How it ends does not matter.
FOREVER = """
n = internal("GET", "/run")["input"] or 1
order(n)
if n == 3:
    internal("PUT", "/result", {"orders": n})
else:
    internal("POST", "/continue", {"input": n + 1})
    sys.exit(n - 1)
"""


@pytest.mark.check_all
def test_twiceshy_run_goes_on_with_the_successor(bench: Bench) -> None:
    bench.agent(INPUT + FOREVER)
    code, _, err = bench.run()
    assert code == 0, err
    assert bench.made("orders") == 3
    of_chain = "SELECT status, continued_as FROM twiceshy.run WHERE id = $1 OR first_run = $1"
    chain = bench.world.fetch(of_chain, bench.run_id)
    assert [row["status"] for row in chain] == ["done"] * 3
    assert [row["continued_as"] is None for row in chain].count(True) == 1
    code, out, err = bench.run()  # by the old id: the result of the last
    assert (code, out) == (0, '{"orders": 3}\n'), err
    assert bench.made("orders") == 3
    assert "continued: it goes on as run" in bench.verb("show", bench.run_id).stdout


#: Orders what it is told to, ten messages to a run; "0" ends it.
ASSISTANT = """
for _ in range(10):
    n = internal("POST", "/events/message/wait")["event"]["payload"]
    if not n:
        internal("PUT", "/result", "bye")
        sys.exit()
    order(n)
internal("POST", "/continue", {"input": None})
"""


@pytest.mark.check_all
def test_an_assistant_for_ever_takes_each_message_once(works: Works) -> None:
    """Messages go to the first id; whoever is killed, and whenever, each is ordered once."""
    works.declare(ASSISTANT)
    [run] = works.queue("chat")
    works.worker("--slots", "1", max_attempts=100)
    for n in range(1, 36):
        send(works, run, n)
        if n % 4 == 0:
            until(works.agents, "an agent is there")
            for pid in works.agents():
                works.shell(f"kill -9 {pid}")
    until(lambda: works.made("orders") == 35, "all are ordered", 90)
    send(works, run, 0)
    newest = "SELECT id FROM twiceshy.run WHERE first_run = $1 AND continued_as IS NULL"
    [last] = works.world.fetch(newest, run)
    works.comes("done", last["id"])
    assert works.result(last["id"]) == "bye"
    assert works.made("orders") == 35
    assert len(works.world.fetch("SELECT FROM twiceshy.run WHERE first_run = $1", run)) == 3


def send(works: Works, run: str, n: int) -> None:
    ask_database(works.world.dsn, events.send, run, "message", str(n).encode(), f"m{n}", limit=10)
