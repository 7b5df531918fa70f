"""When to try again, and what counts as getting nowhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.retry import CAP, FAILURES, backoff, barren

JITTER = st.floats(0, 1)


def test_at_once_then_ever_slower() -> None:
    assert [backoff(n) for n in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff(n, base=0.1, cap=1.0) for n in range(6)] == [0, 0.1, 0.2, 0.4, 0.8, 1.0]


@given(st.integers(-5, 10_000), JITTER, st.floats(0.001, 10), st.floats(0.1, 1000))
def test_the_wait_is_bounded(n: int, jitter: float, base: float, cap: float) -> None:
    wait = backoff(n, jitter, base=base, cap=cap)
    full = backoff(n, base=base, cap=cap)
    assert 0 <= full / 2 <= wait <= full <= cap
    assert (wait == 0) == (n <= 0)


@given(st.integers(0, 100), JITTER)
def test_patience_grows(n: int, jitter: float) -> None:
    assert backoff(n, jitter) <= backoff(n + 1, jitter) <= CAP


@given(st.floats())
def test_no_jitter_breaks_it(jitter: float) -> None:
    assert 0 <= backoff(3, jitter) <= 4


OUTCOMES = ["done", "failed", "died", "stopped", "interrupted", "handed_over", "cancelled"]


@pytest.mark.parametrize("outcome", [None, *OUTCOMES])
def test_what_counts_as_getting_nowhere(outcome: str | None) -> None:
    after = barren(3, outcome, progress=False)
    assert after == (0 if outcome is None else 4 if outcome in FAILURES else 3)
    assert barren(3, outcome, progress=True) == 0


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), st.booleans()), max_size=30))
def test_it_counts_those_since_the_last_progress(course: list[tuple[str, bool]]) -> None:
    count = 0
    for outcome, progress in course:
        count = barren(count, outcome, progress=progress)
    since = next((n for n, (_, progress) in enumerate(reversed(course)) if progress), len(course))
    assert count == sum(outcome in FAILURES for outcome, _ in course[len(course) - since :])
