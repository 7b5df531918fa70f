"""How often a local step is begun, when its time is up, and what its replay stands for."""

from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from proxy.policy import Permit, Policy, gave_up
from proxy.tape import Part, Tape, build
from runtime.entries import AnswerFacts, AnswerRow, Own, StepFacts, StepRow, TapeRows
from runtime.step import Effect, Finality, Kind, RunStatus, State
from tests.core.world import print_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_tries_of_a_step() -> None:
    assert [Policy(max_tries=2).spent(tries) for tries in range(4)] == [False, False, True, True]
    assert not Policy().spent(1000)
    assert "was begun once (max_tries = 1)" in gave_up("r", "k", "embed", 1, Policy(max_tries=1))


def test_the_earlier_of_two_limits_holds() -> None:
    both = Permit(UUID(int=1), Policy(timeout=10.0, heartbeat_timeout=3.0), given=100.0, beaten=100.0)
    assert both.due() == (103.0, "was not heard of for heartbeat_timeout = 3 s")
    both.beaten = 109.0
    assert both.due() == (110.0, "took longer than timeout = 10 s")
    assert Permit(UUID(int=1), Policy(max_tries=1)).due() is None


# ---- what was asked for within local steps


def row(key: str, kind: Kind, begun: int, recorded: int | None, effect: Effect = Effect.IDEMPOTENT) -> StepRow:
    facts = StepFacts(
        key, Effect.REPEATABLE if kind is Kind.LOCAL else effect, True, print_of(key), 0, bytes(16), "POST", "", None,
        b"{}", b"", b"", None if kind is Kind.HTTP else Own(kind, key),
    )  # fmt: skip
    state = State.SENT if recorded is None else State.ANSWERED
    made = StepRow(facts, begun, 1, state, UUID(int=begun), "there", True, 0, NOW)
    if recorded is not None:
        answer = AnswerFacts(200, b"OK", (), b"{}", None, 2, True, Finality.FINAL)
        made.answers.append(AnswerRow(0, recorded, 1, answer))
    return made


def tape(*steps: StepRow) -> Tape:
    rows = TapeRows("r", UUID(int=1), 2, None, RunStatus.RUNNING, None, None, "here", 1.0, False, NOW, list(steps))
    return build(rows, set())


def test_a_replayed_local_step_stands_for_what_was_asked_within_it() -> None:
    made = tape(
        row("before", Kind.HTTP, 1, 2), row("a", Kind.LOCAL, 3, 10), row("within-a", Kind.HTTP, 4, 5),
        row("read", Kind.HTTP, 6, 7, Effect.READ), row("b", Kind.LOCAL, 8, 13), row("within-both", Kind.HTTP, 9, 20),
        row("within-b", Kind.HTTP, 11, 12), row("after", Kind.HTTP, 14, 15),
    )  # fmt: skip
    assert made.missing == {"before", "a", "within-a", "b", "within-both", "within-b", "after"}
    made.attach(made.steps["a"], Part.REPLAYED)
    assert made.missing == {"before", "b", "within-both", "within-b", "after"}
    made.attach(made.steps["b"], Part.REPLAYED)
    assert made.missing == {"before", "after"}


def test_so_does_one_within_another() -> None:
    made = tape(
        row("outer", Kind.LOCAL, 1, 10), row("inner", Kind.LOCAL, 2, 8), row("within", Kind.HTTP, 3, 4),
        row("behind", Kind.HTTP, 9, 12),
    )  # fmt: skip
    made.attach(made.steps["outer"], Part.REPLAYED)
    assert made.missing == set()


def test_one_that_was_never_recorded_stands_for_nothing() -> None:
    made = tape(row("a", Kind.LOCAL, 1, None), row("within", Kind.HTTP, 2, 3))
    made.attach(made.steps["a"], Part.LIVE)
    assert made.missing == {"within"}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=15))
def test_what_is_within_is_what_began_between(drawn: list[tuple[bool, int]]) -> None:
    steps = [
        row(f"k{n}", Kind.LOCAL if local else Kind.HTTP, 10 * n, 10 * n + length)
        for n, (local, length) in enumerate(drawn, 1)
    ]
    made = tape(*steps)
    for inner in steps:
        around = [
            outer.facts.key
            for outer in steps
            if outer.facts.kind is Kind.LOCAL
            and outer.begun < inner.begun < outer.answers[0].recorded
            and (inner.facts.kind is Kind.HTTP or inner.answers[0].recorded < outer.answers[0].recorded)
        ]
        assert made.around.get(inner.facts.key, []) == around
        assert all(inner.facts.key in made.inner[outer] for outer in around)
