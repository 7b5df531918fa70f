"""What is a step at twiceshy.internal, what it waits for, and how it is answered."""

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from proxy import own
from proxy.exchange import Ambiguous, Arrival, Join, NoAttempt, Send, decide, is_repeat
from proxy.message import Request
from proxy.own import Asked
from proxy.refusals import Refusal
from proxy.stillness import Going, held, works
from proxy.tape import Step, Tape, Where, build
from runtime import payload
from runtime.entries import ChildEnd, Decision, Event, Own, StepFacts, StepRow, TapeRows
from runtime.errors import UsageError
from runtime.step import Effect, Kind, RunStatus, State
from tests.core.world import print_of


def asked(method: str, path: str, body: bytes = b"") -> Asked | Refusal | None:
    return own.read(Request(method, "http", "twiceshy.internal", 80, path, (), body), 1000)


@pytest.mark.parametrize(
    ("method", "path", "body", "expected", "effect"),
    [
        ("GET", "/now", b"", Own(Kind.VALUE, "now"), Effect.READ),
        ("POST", "/uuid", b"{}", Own(Kind.VALUE, "uuid"), Effect.READ),
        ("POST", "/random", b'{"bytes": 16}', Own(Kind.VALUE, "random"), Effect.READ),
        ("POST", "/sleep", b'{"seconds": 3.5}', Own(Kind.SLEEP, seconds=3.5), Effect.REPEATABLE),
        (
            "POST", "/sleep", b'{"until": "2026-01-31T10:00:00+01:00"}',
            Own(Kind.SLEEP, until=datetime(2026, 1, 31, 9, tzinfo=UTC)), Effect.REPEATABLE,
        ),
        ("POST", "/events/go/wait", b"", Own(Kind.WAIT, "go"), Effect.REPEATABLE),
        ("POST", "/events/a%2Eb/wait", b'{"timeout": null}', Own(Kind.WAIT, "a.b"), Effect.REPEATABLE),
        ("POST", "/events/go/wait", b'{"timeout": 0}', Own(Kind.WAIT, "go", seconds=0.0), Effect.REPEATABLE),
        ("POST", "/approvals/boss/wait", b"", Own(Kind.APPROVAL, "boss"), Effect.REPEATABLE),
        (
            "POST", "/approvals/boss/wait", b'{"timeout": 3, "request": []}',
            Own(Kind.APPROVAL, "boss", seconds=3.0), Effect.REPEATABLE,
        ),
        ("POST", "/runs", b'{"agent": "a", "input": 1, "priority": -2}', Own(Kind.START, "a"), Effect.REPEATABLE),
        ("POST", "/runs/r.1/wait", b'{"timeout": 2}', Own(Kind.CHILD, "r.1", seconds=2.0), Effect.REPEATABLE),
        ("POST", "/steps", b'{"name": "x", "input": [1]}', Own(Kind.LOCAL, "x"), Effect.REPEATABLE),
        ("POST", "/steps", b'{"name": "x", "at_most_once": true}', Own(Kind.LOCAL, "x"), Effect.AT_MOST_ONCE),
    ],
)  # fmt: skip
def test_what_is_a_step(method: str, path: str, body: bytes, expected: Own, effect: Effect) -> None:
    found = asked(method, path, body)
    assert isinstance(found, Asked)
    assert (found.own, found.rule.effect) == (expected, effect)


def test_what_is_none() -> None:
    for method, path in (("GET", "/run"), ("PUT", "/result"), ("PUT", "/now"), ("GET", "/sleep"), ("POST", "/nowhere")):
        assert asked(method, path) is None
    for body in (b"[1]", b"{", b'{"seconds": 1e999}', b'{"seconds": NaN}', b'{"seconds": 1' + b" " * 1000 + b"}"):
        found = asked("POST", "/sleep", body)
        assert isinstance(found, Refusal)
        assert found.code == "bad-request"


def test_payloads_stay_as_they_were_written() -> None:
    event = Event("one", b'{"a":  1.0, "a": "\\ud800"}', datetime(2026, 1, 31, 9, 0, 0, 5, tzinfo=UTC))
    body = own.came("go", event)
    assert event.payload in body
    assert json.loads(body)["event"] == {
        "id": "one", "name": "go", "at": "2026-01-31T09:00:00.000005Z", "payload": {"a": "\ud800"},
    }  # fmt: skip
    assert own.came("go", None) == b'{"timeout": true}'


def test_how_a_wait_ends() -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=UTC)
    decided = Decision("k", "boss", "decline", "ann", None, at)
    assert json.loads(own.came("boss", decided)) == {
        "approval": {
            "id": "k", "name": "boss", "decision": "decline", "by": "ann", "comment": None,
            "at": "2026-01-31T09:00:00.000000Z",
        }
    }  # fmt: skip
    ended = own.came("child", ChildEnd(RunStatus.DONE, b'{"n":  1e400}', None))
    assert b'"result": {"n":  1e400}' in ended
    assert json.loads(ended.replace(b"1e400", b"1")) == {
        "run": "child", "status": "done", "error": None, "result": {"n": 1},
    }  # fmt: skip
    failed = own.came("child", ChildEnd(RunStatus.FAILED, None, 'it "failed"\n'))
    assert json.loads(failed) == {"run": "child", "status": "failed", "error": 'it "failed"\n', "result": None}
    assert own.came("child", None) == b'{"timeout": true}'


def test_a_member_is_taken_as_it_was_written() -> None:
    text = b' { "a" : [1, {"b": 2}] ,"b":  1e400 , "a" :{"x":  "\\ud800,}"}, "\\u0063": "\xc3\xa9"}  '
    assert payload.member(text, "a") == b'{"x":  "\\ud800,}"}'
    assert payload.member(text, "b") == b"1e400"
    assert payload.member(text, "c") == b'"\xc3\xa9"'
    assert payload.member(text, "d") is None
    assert payload.member(b"{ }", "a") is None
    assert payload.member(b"{}", "a") is None


def test_json_is_read_strictly() -> None:
    assert payload.read(b' {"a": [1, {}]} ', 100, "it") == {"a": [1, {}]}
    for text in (b"", b"NaN", b"[Infinity]", b"\xff", b"'a'", b"{}{}", b"\xef\xbb\xbf1", b"[" * 100_000):
        with pytest.raises(UsageError, match=r"^it "):
            payload.read(text, 1 << 20, "it")


def test_whole_numbers_have_an_end() -> None:
    payload.read(b"9" * payload.DIGITS_MAX, 1 << 20, "it")
    with pytest.raises(UsageError, match=r"^it has a whole number of more than 4300 digits$"):
        payload.read(b"[" + b"9" * (payload.DIGITS_MAX + 1) + b"]", 1 << 20, "it")
    assert payload.read(b'"' + b"9" * 5000 + b'"', 1 << 20, "it") == "9" * 5000
    payload.read(b"0." + b"9" * 5000, 1 << 20, "it")


# ---- how such a step is decided


def step(kind: Kind, effect: Effect = Effect.REPEATABLE, **more: object) -> Step:
    facts = StepFacts("k", effect, False, print_of("a"), 1, bytes(16), "POST", "", None, b"{}", b"", b"", Own(kind))
    return Step(facts, **more)  # type: ignore[arg-type]


def arrival(kind: Kind, effect: Effect = Effect.REPEATABLE, *, tokenless: bool = False) -> Arrival:
    return Arrival(effect, print_of("a"), bytes(16), kind=kind, tokenless=tokenless)


@pytest.mark.parametrize("kind", [Kind.SLEEP, Kind.WAIT, Kind.LOCAL])
def test_what_a_dead_attempt_began_is_taken_over_without_drift(kind: Kind) -> None:
    tape = Tape(2)
    open_ = tape.add(step(kind, state=State.SENT))
    due = decide(tape, arrival(kind), 0.0)
    assert due == Send(open_, occurrence=1, place=0, replaces=open_.exchange)


def test_what_may_be_done_once_is_not_taken_over() -> None:
    tape = Tape(2)
    open_ = tape.add(step(Kind.LOCAL, Effect.AT_MOST_ONCE, state=State.SENT))
    assert decide(tape, arrival(Kind.LOCAL, Effect.AT_MOST_ONCE), 0.0) == Ambiguous(open_)


def test_a_permit_on_its_way_is_joined() -> None:
    tape = Tape(1)
    here = tape.add(step(Kind.LOCAL, Effect.AT_MOST_ONCE, state=State.SENT, where=Where.HERE, claimed=True, lost=True))
    assert decide(tape, arrival(Kind.LOCAL, Effect.AT_MOST_ONCE), 0.0) == Join(here)


def test_a_loop_of_sleeps_is_no_repetition() -> None:
    tape = Tape(1)
    tape.add(step(Kind.SLEEP, claimed=True, had=1, state=State.ANSWERED))
    assert not is_repeat(tape, arrival(Kind.SLEEP), None)
    assert is_repeat(tape, arrival(Kind.HTTP), None)
    assert not isinstance(decide(tape, arrival(Kind.SLEEP, tokenless=True), 0.0), NoAttempt)


def test_a_living_sidecar_keeps_only_what_left_the_house() -> None:
    now = datetime.now(UTC)
    rows = TapeRows("r", UUID(int=1), 2, None, RunStatus.RUNNING, None, None, "here", 1.0, False, now)
    for kind in Kind:
        facts = StepFacts(
            kind, Effect.REPEATABLE, True, print_of(kind), 0, bytes(16), "POST", "", None, b"{}", b"", b"",
            None if kind is Kind.HTTP else Own(kind),
        )  # fmt: skip
        rows.steps.append(StepRow(facts, 1, 1, State.SENT, UUID(int=1), "there", False, 0, now))
    tape = build(rows, set())
    assert {key for key, each in tape.steps.items() if each.where is Where.ELSEWHERE} == {Kind.HTTP}


# ---- when a run may park


def test_a_run_parks_when_nothing_else_goes_on() -> None:
    still = Going({"a": 3.0, "b": 5.0}, others=0, local=0, quiet=2.0)
    assert held(still, 3.0, 2.0) == ("a", "b")
    for going in (
        Going({}, 0, 0, 9.0), Going({"a": 2.9, "b": 5.0}, 0, 0, 9.0), Going({"a": 3.0}, 1, 0, 9.0),
        Going({"a": 3.0}, 0, 1, 9.0), Going({"a": 3.0}, 0, 0, 1.9),
    ):  # fmt: skip
        assert held(going, 3.0, 2.0) == ()


def test_who_takes_a_tenth_of_a_processor_works() -> None:
    assert works(1.0, 1.3, 2.0)
    assert not works(1.0, 1.1, 2.0)
