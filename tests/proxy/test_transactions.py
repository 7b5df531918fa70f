"""A local step recorded in the agent's own transaction: the agent's row and the step are there both, or neither."""

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.database import connect
from tests.apart import apart
from tests.proxy.test_local_steps import STEPS, finish
from tests.stack import PROJECT, Attempt, Reply, Stack, stack

#: Where the agent below kills itself.
POINTS = ("recorded", "committing", "committed", "permit", "begun", "inserted", "told")

#: Does the step once, as a program in any language would: no library. Dies at the point named.
AGENT = """
import asyncio, json, os, signal, sys, urllib.request
import asyncpg
dsn, steps, point = sys.argv[1:]
def at(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)
def ask(address, body=None):
    with urllib.request.urlopen(address, body) as answer:
        return answer.status, json.load(answer)
async def main():
    status, told = ask(steps, json.dumps({"name": "refund", "input": 50, "transaction": True}).encode())
    at("permit")
    if status == 201:
        connection = await asyncpg.connect(dsn)
        await connection.execute("BEGIN")
        at("begun")
        await connection.execute("INSERT INTO refund (run) VALUES ($1)", told["run"])
        at("inserted")
        given = told["run"], told["token"], told["step"], '{"paid": 50}'
        await connection.execute("SELECT twiceshy.record_step($1, $2, $3, $4)", *given)
        at("recorded")
        ending = asyncio.ensure_future(connection.execute("COMMIT"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        at("committing")
        await ending
        at("committed")
        status, told = ask(told["finish"])
    at("told")
    assert (status, told) == (200, {"output": {"paid": 50}}), (status, told)
asyncio.run(main())
"""


def begin(attempt: Attempt, **more: Any) -> Reply:
    return attempt.ask("POST", STEPS, {"name": "refund", "transaction": True, **more})


def recorded(attempt: Attempt, permit: Reply) -> Reply:
    return attempt.ask("GET", permit.json()["finish"])


def in_transaction(made: Stack, permit: Reply, *statements: str, output: str = '{"paid": 50}') -> None:
    """Record the step of *permit* in a transaction with *statements*."""

    async def work() -> None:
        connection = await connect(made.dsn, name="agent")
        try:
            async with connection.transaction():
                for statement in statements:
                    await connection.execute(statement)
                told = permit.json()
                given = (told["run"], told["token"], told["step"], output)
                await connection.execute("SELECT twiceshy.record_step($1, $2, $3, $4)", *given)
        finally:
            await connection.close()

    apart(work())


def test_what_was_recorded_by_sql_is_the_output(shared: Stack) -> None:
    first = shared.claim("sql")
    permit = begin(first, input=1)
    assert (permit.status, permit.json()["run"], permit.json()["token"]) == (201, "sql", first.token)
    assert recorded(first, permit).status == 204
    in_transaction(shared, permit)
    # This sidecar has it in no index.
    known = recorded(first, permit)
    assert (known.status, known.json()) == (200, {"output": {"paid": 50}})
    # What is handed in besides is a second one.
    assert finish(first, permit, b'{"output": 2}').json() == known.json()
    assert begin(first, input=1).step != permit.step  # the next of its kind is another
    again = begin(shared.claim("sql"), input=1)
    assert (again.status, again.body, again.step) == (200, known.body, permit.step)


def test_a_named_step_is_looked_up_in_the_database(shared: Stack) -> None:
    attempt = shared.claim("named")
    headers = {"Twiceshy-Step": "refund-1"}
    body = {"name": "refund", "transaction": True}
    permit = attempt.ask("POST", STEPS, body, headers)
    in_transaction(shared, permit)
    known = attempt.ask("POST", STEPS, body, headers)
    assert (known.status, known.json(), known.replayed) == (200, {"output": {"paid": 50}}, True)


def test_what_was_not_committed_is_tried_again(shared: Stack) -> None:
    attempt = shared.claim("rolled-back")
    permit = begin(attempt)
    with pytest.raises(Exception, match="division by zero"):
        in_transaction(shared, permit, "SELECT 1/0")
    again = finish(attempt, permit, b'{"error": "division", "again": true}')
    assert (again.status, again.json()) == (201, permit.json() | {"try": 2})
    in_transaction(shared, permit)  # whichever permit it was by
    with pytest.raises(Exception, match="is recorded already"):
        in_transaction(shared, again)
    # Who heard nothing of his commit, and takes it for an error, is told better.
    for said in (b'{"error": "lost", "again": true}', b'{"error": "lost"}'):
        assert finish(attempt, again, said).json() == {"output": {"paid": 50}}


@pytest.mark.parametrize("said", [b'{"error": "lost", "again": true}', b'{"error": "lost"}'])
def test_a_commit_that_is_on_its_way_is_waited_for(shared: Stack, said: bytes) -> None:
    attempt = shared.claim(f"late-{len(said)}")
    permit = begin(attempt)

    async def work() -> Reply:
        connection = await connect(shared.dsn, name="agent")
        try:
            async with connection.transaction():
                told = permit.json()
                given = (told["run"], told["token"], told["step"], "1")
                await connection.execute("SELECT twiceshy.record_step($1, $2, $3, $4)", *given)
                answer = asyncio.create_task(asyncio.to_thread(finish, attempt, permit, said))
                await asyncio.wait({answer}, timeout=0.2)
                assert not answer.done()
            return await answer
        finally:
            await connection.close()

    assert apart(work()).json() == {"output": 1}


def test_an_error_is_handed_in_and_an_output_is_not(shared: Stack) -> None:
    attempt = shared.claim("handed-in")
    permit = begin(attempt)
    refused = finish(attempt, permit, b'{"output": 1}')
    assert refused.error == "bad-request"
    assert "twiceshy.record_step" in refused.json()["message"]
    assert finish(attempt, permit, b'{"error": "no funds"}').status == 200
    with pytest.raises(Exception, match="is recorded already"):
        in_transaction(shared, permit)
    assert begin(shared.claim("handed-in")).json() == {"error": "no funds"}
    for wrong in ({"at_most_once": True}, {"transaction": 1}):
        assert begin(shared.claim("handed-in"), **wrong).error == "bad-request"
    nameless = Attempt("nameless", None, shared.sidecar.port)
    refused = begin(nameless)
    assert (refused.status, refused.error) == (428, "no-attempt")
    assert "twiceshy claim nameless" in refused.json()["message"]


WAIT = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen("http://twiceshy.internal/events/go/wait", b"", timeout=20)
except urllib.error.HTTPError as error:
    print(error.headers["Twiceshy-Error"])
"""


@pytest.mark.check_all
def test_a_step_that_is_recorded_lets_the_run_park(dsn: str, tmp_path: Path) -> None:
    with stack(dsn, tmp_path, hold=0.2, park_quiet=0.2, poll=0.2) as made:
        attempt = made.claim("r")
        permit = begin(attempt, timeout=60)
        # In a group of its own, which does nothing but wait.
        waiting = subprocess.Popen(
            [sys.executable, "-c", WAIT],
            env=_environment(made, attempt),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        in_transaction(made, permit)
        assert waiting.communicate(timeout=30)[0] == b"parked\n"


def killed_at_every_point(made: Stack, rounds: int) -> None:
    """Agents of their own process that are killed; the one that comes after each does the rest."""
    apart(_execute(made.dsn, "CREATE TABLE IF NOT EXISTS refund (run text)"))
    for n in range(rounds):
        run = f"kill-{n}"
        point = POINTS[n % len(POINTS)]
        if n < 2 * len(POINTS):
            _agent(made, run, point).wait(30)
        else:
            agent = _agent(made, run, "")
            time.sleep(random.uniform(0.1, 0.8))  # whatever it has come to by then
            agent.kill()
            agent.wait(30)
        rows, steps = _both(made, run)
        assert rows == steps <= 1, (point, rows, steps)
        if n < 2 * len(POINTS) and point in ("permit", "begun", "inserted", "recorded", "committed", "told"):
            assert rows == (1 if point in ("committed", "told") else 0), point
        last = _agent(made, run, "")
        assert last.wait(30) == 0, (point, last.stderr and last.stderr.read())
        assert _both(made, run) == (1, 1), point


def _agent(made: Stack, run: str, point: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", AGENT, made.dsn, STEPS, point]
    return subprocess.Popen(command, env=_environment(made, made.claim(run)), cwd=PROJECT, stderr=subprocess.PIPE)


def _environment(made: Stack, attempt: Attempt) -> dict[str, str]:
    proxy = f"http://{attempt.run}:{attempt.token}@127.0.0.1:{made.sidecar.port}"
    return {**os.environ, "http_proxy": proxy, "no_proxy": ""}


def _both(made: Stack, run: str) -> tuple[int, int]:
    """Rows and recorded steps of *run*, when no transaction of its dead agent is left."""
    deadline = time.monotonic() + 20
    others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = ''"
    while made.fetch(others):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (row,) = made.fetch(
        "SELECT (SELECT count(*) FROM refund WHERE run = $1) AS rows,"
        " (SELECT count(*) FROM twiceshy.step WHERE run_id = $1 AND state = 'answered') AS steps", run,
    )  # fmt: skip
    return row["rows"], row["steps"]


async def _execute(dsn: str, statement: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def test_a_killed_agent_leaves_both_or_neither(shared: Stack) -> None:
    killed_at_every_point(shared, 3)


@pytest.mark.check_all
def test_fifty_killed_agents_leave_both_or_neither(heart: Stack) -> None:
    killed_at_every_point(heart, 50)
