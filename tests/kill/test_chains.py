"""Runs that start others, with workers: the parent holds no process meanwhile, and nothing is started twice."""

import os
import signal

import pytest

from tests.kill.launchers import until
from tests.kill.works import Works

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


def test_cancelling_the_parent_ends_all(works: Works) -> None:
    works.declare(PARENT, children='["b"]')
    [parent] = works.queue("p")
    works.worker("--slots", "4")
    until(lambda: works.world.status(parent) == "parked" and len(works.agents()) == 3, "the children are at work")
    assert works.cli("cancel", parent).returncode == 0
    works.comes("cancelled", parent, *children(works, parent))
    until(lambda: not works.agents(), "no agent is left")
    assert works.made("orders") == 0
