"""What the library asks, and what it makes of the answers. No I/O."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from tests.library.scripted import Script, failing, no, ok, permit
from twiceshy import agent_api, asking, errors, steps
from twiceshy.operation import PERMIT
from twiceshy.wire import Cut

# ---- values and waits


def test_values() -> None:
    moment = Script(ok({"now": "2026-01-31T09:00:00.000001Z"})).play(agent_api.now())
    assert moment == datetime(2026, 1, 31, 9, 0, 0, 1, tzinfo=UTC)
    assert Script(ok({"random": 0.25})).play(agent_api.random()) == 0.25
    name = "7e57d004-2b97-4e7a-b45f-5387367791cd"
    assert Script(ok({"uuid": name})).play(agent_api.uuid4()) == UUID(name)


@pytest.mark.parametrize(
    ("how_long", "body"),
    [
        (3.5, {"seconds": 3.5}),
        (timedelta(days=2), {"seconds": 172800.0}),
        (datetime(2026, 1, 31, tzinfo=UTC), {"until": "2026-01-31T00:00:00+00:00"}),
    ],
)
def test_sleeps(how_long: Any, body: Any) -> None:
    script = Script(ok({"slept_until": "x"}))
    script.play(agent_api.sleep(how_long))
    assert script.asked == [("POST", "/sleep", body)]


def test_a_moment_without_a_zone_is_none() -> None:
    with pytest.raises(ValueError, match="time zone"):
        Script().play(agent_api.sleep(datetime(2026, 1, 31)))  # noqa: DTZ001


def test_events() -> None:
    event = {"id": "1", "name": "a b", "at": "2026-01-31T09:00:00Z", "payload": {"x": 1}}
    script = Script(ok({"event": event}))
    assert script.play(agent_api.wait_event("a b", timeout=timedelta(minutes=1))).payload == {"x": 1}
    assert script.asked == [("POST", "/events/a%20b/wait", {"timeout": 60.0})]
    script = Script(ok({"timeout": True}))
    with pytest.raises(TimeoutError, match="'a' came within 5"):
        script.play(agent_api.wait_event("a", timeout=5))


@pytest.mark.parametrize("decision", ["approve", "decline"])
def test_approvals(decision: str) -> None:
    said = {"id": "k", "name": "pay", "decision": decision, "by": "ann", "comment": None, "at": "2026-01-31T09:00:00Z"}
    script = Script(ok({"approval": said}))
    approval = script.play(agent_api.wait_approval("pay", {"cents": 5}, timeout=9))
    assert (bool(approval), approval.by) == (decision == "approve", "ann")
    assert script.asked == [("POST", "/approvals/pay/wait", {"timeout": 9, "request": {"cents": 5}})]
    with pytest.raises(errors.TimedOut, match="nobody decided 'pay'"):
        Script(ok({"timeout": True})).play(agent_api.wait_approval("pay"))


# ---- runs


def test_input_and_result_of_this_run() -> None:
    assert Script(ok({"run": "r", "input": [1]})).play(agent_api.input()) == [1]
    script = Script(ok(status=204))
    script.play(agent_api.set_result(None))
    assert script.asked == [("PUT", "/result", None)]


def test_children() -> None:
    script = Script(ok({"run": "c1"}))
    assert script.play(agent_api.start("translate", {"x": 1}, priority=3)) == "c1"
    assert script.asked == [("POST", "/runs", {"agent": "translate", "input": {"x": 1}, "priority": 3})]
    done = ok({"run": "c1", "status": "done", "result": 7, "error": None})
    assert Script(done).play(agent_api.result("c1")) == 7
    failed = ok({"run": "c1", "status": "failed", "result": None, "error": "it broke"})
    with pytest.raises(errors.ChildFailed, match="run c1 is failed: it broke"):
        Script(failed).play(agent_api.result("c1"))
    with pytest.raises(errors.TimedOut):
        Script(ok({"timeout": True})).play(agent_api.result("c1", timeout=1))


def test_continuing_as_new_ends_the_process_with_0() -> None:
    script = Script(ok({"run": "next"}))
    with pytest.raises(SystemExit) as ended:
        script.play(agent_api.continue_as_new({"n": 1}))
    assert (ended.value.code, script.asked) == (0, [("POST", "/continue", {"input": {"n": 1}})])
    assert isinstance(ended.value, errors.Continued)
    assert str(ended.value) == "this run goes on as run next"


# ---- steps


def test_a_step_is_given_as_json_live_as_in_replay() -> None:
    live = Script(permit(), ok({"output": [1, {"2": None}]}))
    assert live.play(steps.step("a", lambda *_: (1, {2: None}), "x")) == [1, {"2": None}]
    assert live.asked == [
        ("POST", "/steps", {"name": "a", "input": ["x"]}),
        ("PUT", "/steps/k%230", {"output": [1, {"2": None}]}),
    ]
    replayed = Script(ok({"output": [1, {"2": None}]}))
    assert replayed.play(steps.step("a", failing(AssertionError()), "x")) == [1, {"2": None}]


def test_what_a_step_may_be_told() -> None:
    script = Script(ok({"output": 1}))
    wanted = {"name": "a", "input": [], "at_most_once": True, "max_tries": 3, "timeout": 62.0, "heartbeat_timeout": 5.0}
    step = steps.step("a", int, key="mine", at_most_once=True, max_tries=3, timeout=timedelta(minutes=1),
                      heartbeat_timeout=5)  # fmt: skip
    script.play(step)
    assert script.asked == [("POST", "/steps", wanted)]
    assert script.headers[0]["Twiceshy-Step"] == "mine"


def test_a_failure_is_the_same_live_and_replayed() -> None:
    said = {"error": {"type": "ValueError", "message": "no such order"}}
    live = Script(permit(), ok(said))
    with pytest.raises(errors.StepFailed, match="step a: ValueError: no such order") as first:
        live.play(steps.step("a", failing(ValueError("no such order"))))
    assert live.asked[1] == ("PUT", "/steps/k%230", said)
    assert isinstance(first.value.__cause__, ValueError)
    with pytest.raises(errors.StepFailed, match="step a: ValueError: no such order") as again:
        Script(ok(said)).play(steps.step("a", failing(AssertionError())))
    assert (again.value.type, again.value.error) == ("ValueError", said["error"])


def test_an_output_that_is_no_json_fails_its_step() -> None:
    script = Script(permit(), ok({"error": {"type": "TypeError", "message": "m"}}))
    with pytest.raises(errors.StepFailed):
        script.play(steps.step("a", lambda: float("nan")))
    assert "the output of step a is not JSON" in script.asked[1][2]["error"]["message"]


def test_tries_are_made_one_after_the_other_with_pauses_that_grow() -> None:
    again = [permit(), permit(**{"try": 2}), permit(**{"try": 3})]
    script = Script(again[0], again[1], again[2], ok({"output": "at last"}))
    outcomes = iter([OSError("one"), OSError("two"), None])

    def work() -> str:
        if (error := next(outcomes)) is not None:
            raise error
        return "at last"

    assert script.play(steps.step("a", work, max_tries=3)) == "at last"
    assert script.paused == [1.0, 2.0]
    assert [body.get("again") for _, _, body in script.asked[1:]] == [True, True, None]


def test_the_last_try_s_failure_is_the_step_s() -> None:
    said = {"error": {"type": "OSError", "message": "two"}}
    script = Script(permit(), permit(**{"try": 2}), ok(said))
    with pytest.raises(errors.StepFailed, match="two"):
        script.play(steps.step("a", failing(OSError("two")), max_tries=2))


def test_the_sidecar_s_clock_leaves_room_for_pauses_and_for_the_library_s_own() -> None:
    assert steps.Limits(timeout=60.0).told() == {"timeout": 60.0}
    assert steps.Limits(4, 60.0).told() == {"max_tries": 4, "timeout": 64.0}
    assert steps.Limits(timeout=60.0, cancelled=True).told() == {"timeout": 70.0}
    assert [steps.Limits().pause(n) for n in (0, 1, 2, 7, 99)] == [0, 1, 2, 60, 60]
    assert steps.Limits(heartbeat_timeout=3.0).pause(5) == 1.5


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), errors.Parked("later")])
def test_what_ends_the_process_is_no_outcome(error: BaseException) -> None:
    script = Script(permit())
    with pytest.raises(type(error)):
        script.play(steps.step("a", failing(error)))  # type: ignore[arg-type]
    assert len(script.asked) == 1


def test_within_a_step() -> None:
    made = steps.Permit("a", permit(progress=5))
    token = PERMIT.set(made)
    try:
        assert (steps.progress(), steps.idempotency_key()) == (5, "ik")
        for said, body in (({"n": 6}, {"progress": {"n": 6}}), (None, None)):
            script = Script(ok(status=204))
            script.play(steps.heartbeat(said))
            assert script.asked == [("POST", "/steps/k%230/heartbeat", body)]
        assert steps.progress() == {"n": 6}
    finally:
        PERMIT.reset(token)
    with pytest.raises(RuntimeError, match="no step is being done here"):
        steps.progress()


def test_the_default_of_a_progress_that_was_never_told() -> None:
    token = PERMIT.set(steps.Permit("a", permit()))
    try:
        assert steps.progress(0) == 0
    finally:
        PERMIT.reset(token)


# ---- when it is not answered


def test_a_request_whose_answer_got_lost_is_asked_again_as_the_same() -> None:
    script = Script(ConnectionResetError("gone"), Cut("cut"), no("database-away", status=503), ok({"random": 0.5}))
    assert script.play(agent_api.random()) == 0.5
    assert (script.again, len(script.paused)) == ([0, 1, 2, 3], 3)
    assert len({headers["Idempotency-Key"] for headers in script.headers}) == 1


def test_who_is_never_answered_hears_why() -> None:
    script = Script(*[OSError("refused")] * asking.TRIES)
    with pytest.raises(errors.Unreachable, match="tried 8 times: refused"):
        script.play(agent_api.now())


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        ("parked", errors.Parked, 75),
        ("continued", errors.Continued, 0),
        ("fenced", errors.Fenced, "because"),
        ("sidecar-changed", errors.Fenced, "because"),
        ("not-running", errors.Fenced, "because"),
        ("ambiguous", errors.Ambiguous, "because"),
        ("diverged", errors.Diverged, "because"),
        ("over-budget", errors.OverBudget, "because"),
    ],
)
def test_what_stops_the_attempt_ends_the_process(code: str, kind: type[BaseException], exit_code: object) -> None:
    with pytest.raises(kind) as stopped:
        Script(no(code)).play(agent_api.now())
    assert isinstance(stopped.value, SystemExit) and not isinstance(stopped.value, Exception)
    assert (stopped.value.code, str(stopped.value)) == (exit_code, "because")


def test_what_is_only_wrong_does_not() -> None:
    with pytest.raises(errors.Refused, match="because") as refused:
        Script(no("bad-request", status=400)).play(agent_api.now())
    assert refused.value.code == "bad-request"


# ---- JSON


class _Model(BaseModel):
    a: int


@dataclass
class _Data:
    b: datetime


def test_what_has_one_form_as_json_takes_it() -> None:
    value = {"m": _Model(a=1), "d": _Data(datetime(2026, 1, 1, tzinfo=UTC)), "u": UUID(int=1), "t": (1, 2)}
    assert asking.dump(value, "it") == (
        b'{"m": {"a": 1}, "d": {"b": "2026-01-01T00:00:00+00:00"}, "u": "00000000-0000-0000-0000-000000000001", '
        b'"t": [1, 2]}'
    )


@pytest.mark.parametrize("value", [{1, 2}, float("inf"), object(), b"x", {(1, 2): 3}])
def test_what_has_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="the thing is not JSON"):
        asking.dump(value, "the thing")
