"""How often a local step is begun, how long it may take, and what the next attempt gets of it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.test_local_steps import STEPS, begin, finish
from tests.stack import Attempt, Reply, Stack, stack


def again(attempt: Attempt, permit: Reply, error: str = '"no"') -> Reply:
    return attempt.ask("PUT", permit.json()["finish"], f'{{"again": true, "error":  {error}}}'.encode())


def beat(attempt: Attempt, permit: Reply, body: bytes = b"") -> Reply:
    return attempt.ask("POST", permit.json()["finish"] + "/heartbeat", body)


def test_a_step_that_kills_its_process_each_time_ends(shared: Stack) -> None:
    for n in range(1, 4):
        permit = begin(shared.claim("oom"), max_tries=3)
        assert (permit.status, permit.json()["try"]) == (201, n)
    shared.restart()  # it is counted in the database
    last = shared.claim("oom")
    given_up = begin(last, max_tries=3)
    assert given_up.status == 200
    assert "was begun 3 times (max_tries = 3)" in given_up.json()["error"]
    assert "run oom" in given_up.json()["error"]
    assert begin(last, "next").status == 201
    # That is its outcome, whatever the policy says by then.
    assert begin(shared.claim("oom"), max_tries=9).body == given_up.body
    (row,) = shared.fetch("SELECT own FROM twiceshy.answer WHERE run_id = 'oom'")
    assert row["own"]


def test_more_tries_are_the_same_step(shared: Stack) -> None:
    permit = begin(shared.claim("more"), max_tries=1, timeout=60)
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl has it
    body = b'{"heartbeat_timeout": 60, "max_tries": 2, "name": "embed"}'
    second = shared.claim("more").ask("POST", STEPS, body, headers)
    assert (second.json()["step"], second.json()["try"]) == (permit.step, 2)


def test_an_error_may_be_tried_again(shared: Stack) -> None:
    attempt = shared.claim("again")
    first = begin(attempt, max_tries=3)
    assert beat(attempt, first, b'{"progress": 7}').status == 204
    second = again(attempt, first)
    assert (second.status, second.json()) == (201, first.json() | {"try": 2, "progress": 7})
    attempt = shared.claim("again")
    third = begin(attempt, max_tries=3)
    assert (third.json()["try"], third.json()["progress"]) == (3, 7)
    out = again(attempt, third, '{"n": 1e400}')
    assert (out.status, out.body) == (200, b'{"error": {"n": 1e400}}')
    assert again(attempt, third).body == out.body
    assert begin(shared.claim("again"), max_tries=3).body == out.body
    for wrong in (b'{"output": 1, "again": true}', b'{"error": 1, "again": 1}', b'{"again": true}'):
        assert attempt.ask("PUT", third.json()["finish"], wrong).status in (400, 423)


def test_without_a_limit_it_is_tried_as_often_as_wanted(shared: Stack) -> None:
    attempt = shared.claim("unlimited")
    permit = begin(attempt, at_most_once=True)
    for n in range(2, 6):
        permit = again(attempt, permit)
        assert (permit.status, permit.json()["try"]) == (201, n)
    assert finish(attempt, permit, b'{"error": "enough"}').json() == {"error": "enough"}


@pytest.mark.parametrize("limit", ["timeout", "heartbeat_timeout"])
def test_who_takes_too_long_is_fenced(shared: Stack, limit: str) -> None:
    attempt = shared.claim(limit)
    other = begin(attempt, "other")
    given: dict[str, Any] = {limit: 1.0}
    permit = begin(attempt, **given)
    assert beat(attempt, permit, b'{"progress": [1]}').status == 204
    refused = _refused(attempt)
    assert refused.error == "fenced"
    for words in (permit.step, limit, "local embed", f"run {limit}"):
        assert words in refused.json()["message"]
    assert finish(attempt, permit).error == "fenced"
    assert finish(attempt, other).error == "fenced"
    (run,) = shared.fetch("SELECT status, error FROM twiceshy.run WHERE id = $1", limit)
    assert run["status"] == "queued"
    assert limit in run["error"]
    assert shared.fetch("SELECT outcome FROM twiceshy.attempt WHERE run_id = $1", limit)[0]["outcome"] == "failed"
    later = shared.claim(limit)
    permit = begin(later, **{**given, limit: 60})
    assert (permit.json()["try"], permit.json()["progress"]) == (2, [1])
    assert finish(later, permit).status == 200


def _refused(attempt: Attempt) -> Reply:
    deadline = time.monotonic() + 20
    while (reply := attempt.ask("GET", "http://twiceshy.internal/run")).status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return reply


@pytest.mark.check_all
def test_heartbeats_and_outputs_come_in_time(shared: Stack) -> None:
    attempt = shared.claim("alive")
    permit = begin(attempt, heartbeat_timeout=3.0)
    done = begin(attempt, "done", timeout=3.0, heartbeat_timeout=3.0)
    assert finish(attempt, done).status == 200
    end = time.monotonic() + 5
    while time.monotonic() < end:
        assert beat(attempt, permit).status == 204
    assert finish(attempt, permit).status == 200
    # A try is timed by itself.
    slow = begin(attempt, "slow", timeout=3.0)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        slow = again(attempt, slow)
        assert slow.status == 201
        time.sleep(0.1)
    assert finish(attempt, slow).status == 200


@pytest.mark.check_all
def test_a_sidecar_that_stood_still_hears_first(dsn: str, tmp_path: Path) -> None:
    with stack(dsn, tmp_path, lease=60) as made:
        attempt = made.claim("r")
        permit = begin(attempt, heartbeat_timeout=0.5)
        os.kill(made.sidecar.process.pid, signal.SIGSTOP)
        try:
            beating = attempt.in_background("POST", permit.json()["finish"] + "/heartbeat")
            time.sleep(3)  # it cannot be asked whether time has passed for it
        finally:
            os.kill(made.sidecar.process.pid, signal.SIGCONT)
        assert beating.result().status == 204
        assert finish(attempt, permit).status == 200


def test_what_no_policy_may_say(shared: Stack) -> None:
    attempt = shared.claim("wrong")
    wrong: list[dict[str, Any]] = [{"max_tries": value} for value in (0, -1, 1.5, "3", True, 10**7)]
    wrong += [{name: value} for name in ("timeout", "heartbeat_timeout") for value in (0, -1, "1", True, 1e9, [1])]
    for given in wrong:
        refused = begin(attempt, **given)
        assert refused.error == "bad-request", given
        assert next(iter(given)) in refused.json()["message"]
    assert begin(attempt, max_tries=None, timeout=None).status == 201
