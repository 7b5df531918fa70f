"""The tape as text: columns cut where attempts died, and a summary that says what to do."""

import json
import re
import shlex
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from runtime.step import Effect, Finality, Kind, RunStatus, State
from runtime.summary import needs_a_person, settle, summary, until
from runtime.tape import (
    AttemptLine,
    Counts,
    StepLine,
    Tape,
    as_json,
    picture,
    read_attempt,
)


def step(n: int, attempt: int = 1, **more: object) -> StepLine:
    given: dict[str, object] = {
        "key": f"k{n}", "attempt": attempt, "effect": Effect.IDEMPOTENT, "state": State.ANSWERED, "method": "POST",
        "url": f"http://shop.test/orders/{n}", "statuses": (200,), "finality": Finality.FINAL,
    }  # fmt: skip
    return StepLine(**(given | more))  # type: ignore[arg-type]


def attempt(n: int, outcome: str | None, **parts: str) -> AttemptLine:
    return AttemptLine(n, outcome, None, Counts(live=len(parts)), dict(parts))


REFUND = Tape(
    "refund-7",
    RunStatus.DONE,
    "refund",
    attempts=[
        attempt(1, "died", k1="live", k2="live"),
        attempt(2, "handed_over", k1="replayed", k2="joined", k3="live"),
        attempt(3, "done", k1="replayed", k2="replayed", k3="replayed", k4="live"),
    ],
    steps=[
        step(1),
        step(2),
        step(3, 2, statuses=(503, 200), effect=Effect.REPEATABLE),
        step(4, 3, finality=Finality.DOUBTFUL, statuses=(500,), effect=Effect.AT_MOST_ONCE),
    ],
)


def test_the_picture() -> None:
    assert picture(REFUND, width=110) == (
        "run refund-7 · refund · done · 3 attempts\n"
        "\n"
        "                     attempt  1           2           3\n"
        "1  POST   shop.test/orders/1  live        replayed    replayed    idempotent    200\n"
        "2  POST   shop.test/orders/2  live        joined      replayed    idempotent    200\n"
        "3  POST   shop.test/orders/3  ✂ died      live        replayed    repeatable    503→200\n"
        "4  POST   shop.test/orders/4              ↷ restart   live        at_most_once  500 unsure\n"
        "                                                      ✔ done"
    )


def test_an_attempt_without_a_tape_shows_what_it_began() -> None:
    tape = Tape("r", RunStatus.QUEUED, attempts=[AttemptLine(1, "died"), attempt(2, "failed", k1="replayed")],
                steps=[step(1), step(2, state=State.SENT, statuses=(), finality=None)])  # fmt: skip
    lines = picture(tape).splitlines()
    assert re.search(r"orders/1 +live +replayed", lines[3])
    assert re.search(r"orders/2 +live +✂ failed +idempotent +in flight", lines[4])
    assert tape.counts == Counts(live=3)


def test_colours_change_nothing_else() -> None:
    painted = picture(REFUND, width=110, colour=True)
    assert "\x1b[35mjoined" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == picture(REFUND, width=110)


def test_a_run_without_steps_has_a_picture() -> None:
    assert picture(Tape("r", RunStatus.QUEUED)).startswith("run r · queued · 0 attempts")
    assert "▸ running" in picture(Tape("r", RunStatus.RUNNING, attempts=[AttemptLine(1)]))


def test_many_attempts_are_left_out_in_the_middle() -> None:
    many = Tape("r", RunStatus.DONE, attempts=[AttemptLine(n, "died") for n in range(1, 51)], steps=[step(1)])
    head = picture(many, width=100).splitlines()[2].split()
    assert head[1] == "1"
    assert "…" in head
    assert head[-1] == "50"


def test_where_two_columns_fit_there_are_two() -> None:
    many = Tape("r", RunStatus.DONE, attempts=[AttemptLine(n, "died") for n in range(1, 4)],
                steps=[step(n, 3, state=State.SENT, url="http://h/" + "0" * 40) for n in range(1, 11)])  # fmt: skip
    assert picture(many, width=90).splitlines()[2].split() == ["attempt", "…", "3"]


words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=90)
tapes = st.builds(
    Tape,
    st.just("r1"),
    st.sampled_from(RunStatus),
    attempts=st.lists(st.sampled_from(["died", "done", None]), max_size=30).map(
        lambda outcomes: [AttemptLine(n, outcome) for n, outcome in enumerate(outcomes, 1)]
    ),
    steps=st.lists(st.tuples(st.integers(1, 30), words, st.sampled_from(State)), max_size=12).map(
        lambda rows: [step(n, row[0], url=f"http://h/{row[1]}", state=row[2]) for n, row in enumerate(rows, 1)]
    ),
)


@given(tapes, st.integers(90, 200))
def test_the_picture_keeps_its_width_and_shows_every_step(tape: Tape, width: int) -> None:
    lines = picture(tape, width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) >= 3 + len(tape.steps)


@given(tapes)
def test_everything_can_be_said_as_json(tape: Tape) -> None:
    assert json.loads(json.dumps(as_json(tape)))["run"] == "r1"


def test_the_summary_of_a_done_run() -> None:
    counted = Tape("r", RunStatus.DONE, attempts=[
        AttemptLine(1, "died", None, Counts(live=3)),
        AttemptLine(2, "done", 0, Counts(live=1, replayed=2, joined=1, drift=1, calls_saved=1, tokens_saved=1234)),
    ])  # fmt: skip
    assert summary(counted) == [
        "run r done · 2 attempts (died) · 4 live, 2 replayed, 1 joined · saved 1 LLM call, 1,234 tokens · drift 1"
    ]


def test_a_local_step_that_failed_says_so_and_by_what() -> None:
    local = step(1, kind=Kind.LOCAL, subject="print", effect=Effect.REPEATABLE, error="ValueError: out of\npaper")
    tape = Tape("r", RunStatus.FAILED, error="5 attempts", attempts=[attempt(1, "failed", k1="live")], steps=[local])
    assert picture(tape).splitlines()[3].split() == ["1", "local", "print", "live", "repeatable", "failed"]
    assert summary(tape)[1:] == ["failed: 5 attempts", "  step 1, local print: ValueError: out of paper"]
    assert as_json(tape)["steps"][0]["error"] == "ValueError: out of\npaper"


def test_the_summary_names_what_nobody_can_be_sure_of() -> None:
    assert summary(REFUND)[1] == (
        "unsure: POST http://shop.test/orders/4 was answered 500: whether it was done is not known (step k4)"
    )


def test_the_summary_says_what_did_not_come_through() -> None:
    told = b'{"hints": ["api.test: this client does not trust the CA"], "steps": []}'
    attempts = [read_attempt(1, "failed", 1, told), read_attempt(2, "done", 0, b"{}"), read_attempt(3, "done", 0, told)]
    tape = Tape("r", RunStatus.DONE, attempts=attempts)
    assert summary(tape)[1:] == ["note: api.test: this client does not trust the CA (attempts 1, 3)"]
    assert [len(each["hints"]) for each in as_json(tape)["attempts"]] == [1, 0, 1]
    assert read_attempt(1, None, None, b'{"hints": 7}').hints == ()


def test_the_summary_says_what_passed_unjournalled() -> None:
    first = (
        b'{"arrived": {"rt.test": {"tunnel": 1, "refused": 3}, "ws.test:8": {"WebSocket": 1}, "a": {"journalled": 9}}}'
    )
    second = b'{"arrived": {"rt.test": {"tunnel": 1, "WebSocket": 2}}}'
    attempts = [
        read_attempt(1, "died", None, first),
        read_attempt(2, "done", 0, second),
        read_attempt(3, None, None, b"{}"),
    ]
    tape = Tape("r", RunStatus.DONE, attempts=attempts)
    assert summary(tape)[1:] == ["unjournalled: rt.test (2 tunnels, 2 WebSockets), ws.test:8 (1 WebSocket)"]
    assert [each["unjournalled"] for each in as_json(tape)["attempts"]] == [
        {"rt.test": {"tunnel": 1}, "ws.test:8": {"WebSocket": 1}},
        {"rt.test": {"tunnel": 1, "WebSocket": 2}},
        {},
    ]
    for broken in (b'{"arrived": 7}', b'{"arrived": {"a": 7}}', b'{"arrived": {"a": {"tunnel": "x"}}}'):
        assert read_attempt(1, None, None, broken).unjournalled == {}


def test_hosts_are_named_by_clients() -> None:
    told = {"arrived": {f"\x1b[31m{n}" + "x" * 500: {"tunnel": 1} for n in range(30)}}
    [line] = summary(Tape("r", RunStatus.DONE, attempts=[read_attempt(1, "done", 0, json.dumps(told).encode())]))[1:]
    assert line.isprintable()
    assert line.endswith("and 20 hosts more")
    assert len(line) < 2500


def test_what_a_parked_run_waits_for() -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=UTC)
    assert until(at, ["go"]) == "until 2026-01-31 09:00:00Z or for the event go"
    assert until(None, ["a", "b", "approval:boss"]) == "for one of the events a, b or for the approval boss"
    assert until(None, ["run:r1", "run:r2"]) == "for the end of one of the runs r1, r2"
    assert until(None, []) == "for nothing"


def test_a_stopped_run_says_the_exact_command() -> None:
    key = "mail to o'brien"
    lost = step(4, key=key, state=State.AMBIGUOUS, statuses=(), finality=None, evidence="connection reset")
    tape = Tape("r", RunStatus.AMBIGUOUS, stop_step=key, stop_message="the answer was lost", steps=[step(1), lost])
    text = "\n".join(summary(tape))
    assert "needs a person: ambiguous: the answer was lost" in text
    assert "(connection reset)" in text
    commands = [line.partition(":  ")[2].strip() for line in needs_a_person(tape) if "done:  " in line]
    assert [shlex.split(command) for command in commands] == [
        ["twiceshy", "resolve", "r", key, how] for how in ("assume_done", "send_again")
    ]
    assert settle("r", "k1", "send_again") == "twiceshy resolve r k1 send_again"


def test_a_tape_that_cannot_be_read_is_none() -> None:
    whole = read_attempt(1, "died", 9, b'{"live": 2, "calls_saved": 1, "steps": [["a", "live"]], "new": 1}')
    assert whole.counts == Counts(live=2, calls_saved=1)
    assert whole.parts == {"a": "live"}
    for broken in (None, b"", b"\xff", b"[]", b'{"live": "x"}', b'{"steps": [1]}', b'{"steps": 7}', b'{"live": []}'):
        assert read_attempt(1, None, None, broken).counts is None
