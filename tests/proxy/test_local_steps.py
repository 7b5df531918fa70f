"""Local steps: a permit, then an output, and that from then on. What is done at most once is not permitted twice."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

import pytest

from tests import raw
from tests.stack import Attempt, Reply, Stack, stack

STEPS = "http://twiceshy.internal/steps"


def begin(attempt: Attempt, name: str = "embed", step: str | None = None, **more: Any) -> Reply:
    headers = {} if step is None else {"Twiceshy-Step": step}
    return attempt.ask("POST", STEPS, {"name": name, **more}, headers)


def terms(permit: Reply) -> dict[str, Any]:
    """A permit but for how many there were."""
    assert permit.status == 201
    given: dict[str, Any] = permit.json()
    del given["try"]
    return given


def finish(attempt: Attempt, permit: Reply, body: bytes = b'{"output": 1}') -> Reply:
    return attempt.ask("PUT", permit.json()["finish"], body)


def test_an_output_is_recorded_as_it_was_handed_in(shared: Stack) -> None:
    first = shared.claim("output")
    permit = begin(first, input={"n": 1})
    assert permit.status == 201
    assert permit.json()["step"] == permit.step
    assert UUID(permit.json()["idempotency_key"]).version == 4
    body = b'{"output":  {"n": 1e400, "n": "\\u0000\\ud800"} }'
    done = finish(first, permit, body)
    assert (done.status, done.body) == (200, body)
    assert finish(first, permit, b'{"output": 2}').body == body  # the first one counts
    other = begin(first, input={"n": 1})
    assert other.status == 201
    assert other.step != permit.step
    shared.restart()
    second = shared.claim("output")
    again = begin(second, input={"n": 1})
    assert (again.status, again.replayed, again.body) == (200, True, body)
    # What was begun and not finished is permitted again, under the same key.
    taken_over = begin(second, input={"n": 1})
    assert terms(taken_over) == terms(other)
    assert (other.json()["try"], taken_over.json()["try"]) == (1, 2)
    assert finish(second, taken_over, b'{"error": "no"}').status == 200
    third = shared.claim("output")
    assert [begin(third, input={"n": 1}).body for _ in range(2)] == [body, b'{"error": "no"}']


def test_steps_in_parallel_have_permits_of_their_own(shared: Stack) -> None:
    attempt = shared.claim("parallel")
    with ThreadPoolExecutor(8) as threads:
        permits = list(threads.map(lambda _: begin(attempt), range(8)))
        assert {each.status for each in permits} == {201}
        assert len({each.step for each in permits}) == 8
        for n, each in enumerate(permits):
            assert finish(attempt, each, b'{"output": %d}' % n).status == 200
        later = shared.claim("parallel")
        assert sorted(each.json()["output"] for each in threads.map(lambda _: begin(later), range(8))) == list(range(8))


def test_what_may_be_done_once_stops_the_run(shared: Stack) -> None:
    first = shared.claim("once")
    permit = begin(first, "mail", at_most_once=True)
    assert permit.status == 201
    second = shared.claim("once")
    refused = begin(second, "mail", at_most_once=True)
    assert (refused.status, refused.error) == (424, "ambiguous")
    assert "local mail" in refused.json()["message"]
    assert begin(second, "other").status == 424
    assert shared.end(second, "failed") == "ambiguous"
    shared.resolve("once", permit.step, "assume_done", body=b'{"output": "sent"}')
    assert begin(shared.claim("once"), "mail", at_most_once=True).json() == {"output": "sent"}


def test_what_did_not_happen_is_permitted_again(shared: Stack) -> None:
    permit = begin(shared.claim("unsent"), "mail", at_most_once=True)
    second = shared.claim("unsent")
    assert begin(second, "mail", at_most_once=True).status == 424
    shared.end(second, "failed")
    shared.resolve("unsent", permit.step, "send_again")
    third = shared.claim("unsent")
    again = begin(third, "mail", at_most_once=True)
    assert terms(again) == terms(permit)
    assert finish(third, again).status == 200


def test_a_permit_that_was_lost_on_its_way_is_given_again(shared: Stack) -> None:
    attempt = shared.claim("lost")
    body = json.dumps({"name": "mail", "at_most_once": True}).encode()
    with raw.locked(shared.dsn, "lost") as lock:
        wire = raw.asked(attempt, "POST", STEPS, b"Content-Type: application/json", body=body)
        lock.wait_wanted()
        wire.reset()
        lock.release()
    assert begin(attempt, "mail", at_most_once=True).status == 201
    assert len(shared.fetch("SELECT FROM twiceshy.step WHERE run_id = 'lost'")) == 1


def test_a_named_step_that_is_begun_twice_in_one_attempt(shared: Stack) -> None:
    attempt = shared.claim("named")
    permit = begin(attempt, step="index")
    assert terms(begin(attempt, step="index")) == terms(permit)
    assert finish(attempt, permit).status == 200
    assert begin(attempt, step="index").json() == {"output": 1}
    assert begin(attempt, "mail", step="mail", at_most_once=True).status == 201
    assert begin(attempt, "mail", step="mail", at_most_once=True).error == "ambiguous"


def test_what_may_be_done_once_is_permitted_to_one_of_those_who_ask_for_it_at_once(shared: Stack) -> None:
    attempt = shared.claim("at-once")
    with ThreadPoolExecutor(8) as threads:
        asked = threads.map(lambda _: begin(attempt, "mail", step="mail", at_most_once=True), range(8))
        assert sorted(each.status for each in asked) == [201] + [424] * 7


def test_only_the_attempt_that_has_the_permit_hands_in(shared: Stack) -> None:
    first = shared.claim("fenced")
    permit = begin(first)
    second = shared.claim("fenced")
    assert second.ask("GET", "http://twiceshy.internal/run").json()["attempt"] == 2
    assert finish(first, permit).error == "fenced"
    assert finish(second, permit).error == "bad-request"
    assert terms(begin(second)) == terms(permit)
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda n: finish(second, permit, b'{"output": %d}' % n), range(8)))
    assert len({each.body for each in replies}) == 1
    assert begin(shared.claim("fenced")).body == replies[0].body


def test_the_next_permit_carries_the_progress(shared: Stack) -> None:
    def beat(attempt: Attempt, permit: Reply, body: bytes = b"") -> Reply:
        return attempt.ask("POST", permit.json()["finish"] + "/heartbeat", body)

    first = shared.claim("progress")
    permit = begin(first)
    assert "progress" not in permit.json()
    assert beat(first, permit).status == 204
    assert beat(first, permit, b'{"progress":  {"page": 1e400} }').status == 204
    assert beat(first, permit).status == 204  # which says nothing new
    for body in (b"1", b'{"page": 7}', b"{"):
        assert beat(first, permit, body).error == "bad-request"
    second = shared.claim("progress")
    assert begin(second, "other").status == 201
    assert beat(first, permit).error == "fenced"
    assert beat(second, permit).error == "bad-request"
    again = begin(second)
    assert b'"progress":  {"page": 1e400}' in again.body
    assert beat(second, again, b'{"progress": 8}').status == 204
    assert finish(second, again).status == 200
    assert beat(second, again).error == "bad-request"


@pytest.mark.check_all
def test_a_heartbeat_keeps_the_lease(dsn: str, tmp_path: Path) -> None:
    with stack(dsn, tmp_path, lease=3) as made:
        attempt = made.claim("r", kind="claim")
        permit = begin(attempt)
        left = "SELECT extract(epoch FROM lease_expires_at - now())::float8 AS left FROM twiceshy.run"
        deadline = time.monotonic() + 20
        while made.fetch(left)[0]["left"] > 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert attempt.ask("POST", permit.json()["finish"] + "/heartbeat").status == 204
        assert made.fetch(left)[0]["left"] > 2


@pytest.mark.check_all
@pytest.mark.parametrize("point", ["before-intent", "intent-written", "before-record", "recorded"])
def test_a_sidecar_that_dies_around_a_record(dsn: str, tmp_path: Path, point: str) -> None:
    with stack(dsn, tmp_path, failpoint=point) as made:
        attempt = made.claim("r")
        try:
            finish(attempt, begin(attempt, at_most_once=True))
        except OSError:
            pass
        del made.settings["failpoint"]
        made.restart()
        again = begin(made.claim("r"), at_most_once=True)
        expected = {"before-intent": 201, "intent-written": 424, "before-record": 424, "recorded": 200}
        assert again.status == expected[point]


def test_what_is_malformed_is_refused(shared: Stack) -> None:
    attempt = shared.claim("malformed")
    wrong: tuple[dict[str, Any], ...] = ({"name": 5}, {"name": "a b"}, {"at_most_once": 1}, {"once": True})
    for more in wrong:
        given: dict[str, Any] = {"name": "x"} | more
        assert begin(attempt, **given).error == "bad-request", more
    permit = begin(attempt)
    for body in (b"", b"1", b"{}", b'{"output": NaN}', b'{"output": 1, "error": 2}', b'{"result": 1}', b"\xff"):
        assert finish(attempt, permit, body).error == "bad-request", body
    assert attempt.ask("PUT", f"{STEPS}/{quote('nobody#1', safe='')}", b'{"output": 1}').error == "not-found"
    too_large = b'{"output": "' + b"x" * (1 << 20) + b'"}'
    assert "payload_max" in finish(attempt, permit, too_large).json()["message"]
    large = too_large.replace(b"x" * 1000, b"", 1)
    assert finish(attempt, permit, large).body == large
    assert begin(shared.claim("malformed")).body == large
