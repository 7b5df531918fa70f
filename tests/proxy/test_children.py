"""Child runs at twiceshy.internal: started once, by those who may, and waited for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import runs, verbs
from tests.proxy.waiting import ask, call, until_open
from tests.stack import ROUTES, Attempt, Stack, stack

AGENTS = """
[agents.parent]
command = ["true"]
children = ["other", "undeclared"]

[agents.other]
command = ["true"]
input_schema = { type = "object", required = ["n"] }
"""


def configured(folder: Path) -> Path:
    """Rules of the sandbox, and agents."""
    made = folder / "twiceshy.toml"
    made.write_text(ROUTES.read_text() + AGENTS)
    return made


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with stack(module_dsn, folder, poll=0.1, hold=60, config=configured(folder)) as made:
        yield made


def parent(stack: Stack, run: str, agent: str = "parent") -> Attempt:
    call(stack, runs.create, run, agent=agent)
    return stack.claim(run)


def end(stack: Stack, child: str, outcome: str, result: bytes | None = None) -> None:
    attempt = stack.claim(child)
    if result is not None:
        attempt.ask("PUT", "http://twiceshy.internal/result", result)
    stack.end(attempt, outcome, final=True)


def steps(stack: Stack, run: str) -> int:
    return len(stack.fetch("SELECT FROM twiceshy.step WHERE run_id = $1", run))


def test_who_failed_by_a_child_that_was_retried_hears_of_it_again(shared: Stack) -> None:
    attempt = parent(shared, "again")
    child = ask(attempt, "/runs", {"agent": "other", "input": {"n": 1}}).json()["run"]
    end(shared, child, "failed")
    assert ask(attempt, f"/runs/{child}/wait").json()["status"] == "failed"
    shared.end(attempt, "failed", final=True)
    call(shared, verbs.retry, "again")
    call(shared, verbs.retry, child)
    end(shared, child, "done", b"7")
    attempt = shared.claim("again")
    assert ask(attempt, "/runs", {"agent": "other", "input": {"n": 1}}).replayed
    assert ask(attempt, f"/runs/{child}/wait").json()["result"] == 7
    assert ask(shared.claim("again"), f"/runs/{child}/wait").json()["result"] == 7


def test_a_child_is_started_once_and_waited_for(shared: Stack) -> None:
    attempt = parent(shared, "p")
    body = b'{"agent": "other", "input": {"n":  1e400, "n": 2}, "priority": 3}'
    started = attempt.ask("POST", "http://twiceshy.internal/runs", body)
    child = started.json()["run"]
    [row] = shared.fetch("SELECT * FROM twiceshy.run WHERE id = $1", child)
    assert (row["agent"], row["input"], row["status"]) == ("other", b'{"n":  1e400, "n": 2}', "queued")
    assert (row["parent"], row["priority"], row["for_workers"]) == ("p", 3, True)
    assert ask(attempt, f"/runs/{child}/wait", {"timeout": 0}).json() == {"timeout": True}
    waiting = attempt.in_background("POST", f"http://twiceshy.internal/runs/{child}/wait")
    until_open(shared, "p")
    end(shared, child, "done", b'{"sum":  1e400}')
    ended = waiting.result()
    assert b'"result": {"sum":  1e400}' in ended.body
    assert {**ended.json(), "result": None} == {"run": child, "status": "done", "error": None, "result": None}

    later = shared.claim("p")
    again = later.ask("POST", "http://twiceshy.internal/runs", body)
    assert (again.replayed, again.body) == (True, started.body)
    assert ask(later, f"/runs/{child}/wait", {"timeout": 0}).json() == {"timeout": True}
    assert later.ask("POST", f"http://twiceshy.internal/runs/{child}/wait").body == ended.body
    another = later.ask("POST", "http://twiceshy.internal/runs", body)  # equal, and the next one
    assert another.json()["run"] != child
    assert len(shared.fetch("SELECT FROM twiceshy.run WHERE parent = 'p'")) == 2


def test_a_child_that_fails_or_is_cancelled_has_ended(shared: Stack) -> None:
    attempt = parent(shared, "sad")
    children = [ask(attempt, "/runs", {"agent": "other", "input": {"n": n}}).json()["run"] for n in range(2)]
    waits = [attempt.in_background("POST", f"http://twiceshy.internal/runs/{child}/wait") for child in children]
    until_open(shared, "sad", 2)
    end(shared, children[0], "failed")
    call(shared, verbs.cancel, children[1])
    assert [wait.result().json()["status"] for wait in waits] == ["failed", "cancelled"]


def test_who_may_not_starts_nothing_and_no_step_is_there(shared: Stack) -> None:
    attempt = parent(shared, "allowed")
    for body, status, code in (
        ({"agent": "parent"}, 403, "denied"),
        ({"agent": "nobody"}, 403, "denied"),
        ({"agent": "undeclared"}, 400, "bad-request"),
        ({"agent": "other", "input": {}}, 400, "bad-request"),
        ({"agent": "other"}, 400, "bad-request"),
        ({"agent": "other", "input": {"n": 1}, "priority": 10**7}, 400, "bad-request"),
        ({"agent": "other", "input": {"n": 1}, "run": "mine"}, 400, "bad-request"),
        ({"input": {"n": 1}}, 400, "bad-request"),
    ):
        reply = ask(attempt, "/runs", body)
        assert (reply.status, reply.error) == (status, code), body
    stranger = parent(shared, "stranger", "other")
    reply = ask(stranger, "/runs", {"agent": "other", "input": {"n": 1}})
    assert reply.status == 403
    assert '[agents.other] children = ["other"]' in reply.json()["detail"]
    assert ask(stranger, "/runs/allowed/wait").status == 404
    assert ask(stranger, "/runs/a%0ab/wait").status == 400
    assert [steps(shared, run) for run in ("allowed", "stranger")] == [0, 0]
    assert shared.fetch("SELECT FROM twiceshy.run WHERE parent IN ('allowed', 'stranger')") == []


def test_a_cancelled_parent_starts_nothing(shared: Stack) -> None:
    attempt = parent(shared, "stopped")
    call(shared, verbs.cancel, "stopped")
    assert ask(attempt, "/runs", {"agent": "other", "input": {"n": 1}}).error == "not-running"
    assert shared.fetch("SELECT FROM twiceshy.run WHERE parent = 'stopped'") == []


@pytest.mark.check_all
@pytest.mark.parametrize("point", ["intent-written", "before-record", "recorded"])
def test_a_sidecar_that_dies_around_the_start_starts_one(dsn: str, tmp_path: Path, point: str) -> None:
    with stack(dsn, tmp_path, poll=0.1, failpoint=f"{point}:1", config=configured(tmp_path)) as made:
        attempt = parent(made, "r")
        with pytest.raises(OSError):
            ask(attempt, "/runs", {"agent": "other", "input": {"n": 1}})
        del made.settings["failpoint"]
        made.restart()
        started = ask(made.claim("r"), "/runs", {"agent": "other", "input": {"n": 1}}).json()
        assert ask(made.claim("r"), "/runs", {"agent": "other", "input": {"n": 1}}).json() == started
        [child] = made.fetch("SELECT id FROM twiceshy.run WHERE parent = 'r'")
        assert started == {"run": child["id"]}
