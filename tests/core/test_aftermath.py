"""What follows when an exchange brought no whole answer: every case there is, and what must never follow."""

from itertools import product

import pytest

from proxy.aftermath import Failure, Then, after, pause
from proxy.exchange import Mode
from runtime.step import Effect

RESENT = [Effect.READ, Effect.REPEATABLE, Effect.IDEMPOTENT]  # "The sidecar itself re-sends only …"
NEVER_RESENT = [Effect.AT_MOST_ONCE, Effect.PASSTHROUGH]
STARTED = [Failure.INTERRUPTED, Failure.SILENT, Failure.CUT]
MODES: list[Mode] = ["durable", "journal", "naive"]
BOOLS = [False, True]


@pytest.mark.parametrize("effect", RESENT)
@pytest.mark.parametrize("failure", [Failure.NOT_SENT, Failure.INTERRUPTED, Failure.CUT])
def test_a_network_failure_is_tried_again_while_sendings_are_left(effect: Effect, failure: Failure) -> None:
    assert after(failure, effect, left=1, heard=False) is Then.SEND_AGAIN
    assert after(failure, effect, left=0, heard=False) is not Then.SEND_AGAIN


@pytest.mark.parametrize("effect", NEVER_RESENT)
def test_what_must_go_once_is_never_sent_again(effect: Effect) -> None:
    """Re-sends only read, repeatable, idempotent. What is passed through, and all of mode naive, may be anything."""
    for failure, heard, mode in product(Failure, BOOLS, MODES):
        assert after(failure, effect, left=9, heard=heard, mode=mode) is not Then.SEND_AGAIN


@pytest.mark.parametrize("effect", list(Effect))
def test_a_time_limit_is_no_network_failure(effect: Effect) -> None:
    for heard, mode in product(BOOLS, MODES):
        assert after(Failure.SILENT, effect, left=9, heard=heard, mode=mode) is not Then.SEND_AGAIN


@pytest.mark.parametrize("effect", list(Effect))
def test_before_the_first_byte_the_step_stays_free(effect: Effect) -> None:
    """Unreachable 502 … before the first byte they are not_sent: at_most_once too."""
    for mode in MODES:
        assert after(Failure.NOT_SENT, effect, left=0, heard=False, mode=mode) is Then.OWN_NOT_SENT


@pytest.mark.parametrize("failure", STARTED)
def test_what_must_go_once_is_ambiguous_when_it_is_lost(failure: Failure) -> None:
    """Unknown (lost after the first byte left, cut body): ambiguous, also if a client was given part of it."""
    for left, heard in product((0, 1), BOOLS):
        assert after(failure, Effect.AT_MOST_ONCE, left=left, heard=heard) is Then.AMBIGUOUS


def test_nothing_else_is_ever_ambiguous() -> None:
    for failure, effect, left, heard, mode in product(Failure, Effect, (0, 1), BOOLS, MODES):
        if after(failure, effect, left=left, heard=heard, mode=mode) is Then.AMBIGUOUS:
            assert (effect, mode) == (Effect.AT_MOST_ONCE, "durable")
            assert failure is not Failure.NOT_SENT


@pytest.mark.parametrize("effect", [effect for effect in Effect if effect is not Effect.AT_MOST_ONCE])
@pytest.mark.parametrize("failure", STARTED)
def test_a_cut_answer_is_kept_only_if_it_was_delivered_so(effect: Effect, failure: Failure) -> None:
    """Truncated: kept as an answer only if it was delivered so; else the failure is an answer of our own."""
    assert after(failure, effect, left=9, heard=True) is Then.CUT_ANSWER
    assert after(failure, effect, left=0, heard=False) is Then.OWN_ANSWERED


@pytest.mark.parametrize("failure", STARTED)
def test_modes_for_comparison_stop_no_run(failure: Failure) -> None:
    assert after(failure, Effect.AT_MOST_ONCE, left=9, heard=False, mode="journal") is Then.OWN_ANSWERED
    assert after(failure, Effect.AT_MOST_ONCE, left=9, heard=True, mode="journal") is Then.CUT_ANSWER


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause(tries) for tries in range(1, 20)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] <= 5
