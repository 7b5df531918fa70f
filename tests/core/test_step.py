"""The step's table, and what settles a step, case by case as DESIGN §3.8 says it."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.step import TRANSITIONS, Effect, Event, Finality, RunStatus, State, finality

FINAL, PROVISIONAL, DOUBTFUL = Finality.FINAL, Finality.PROVISIONAL, Finality.DOUBTFUL
ASKED_AGAIN = [Effect.READ, Effect.REPEATABLE, Effect.IDEMPOTENT]
MIGRATIONS = Path(__file__).parents[2] / "runtime" / "migrations"


# ---- finality: "2xx, 3xx, 4xx are final, except 401, 403, 407, 408, 425, 429 … and 5xx"


@pytest.mark.parametrize("effect", ASKED_AGAIN)
@pytest.mark.parametrize(
    ("status", "settles"),
    [
        (200, FINAL),  # 2xx are final
        (201, FINAL),
        (204, FINAL),
        (301, FINAL),  # 3xx are final
        (304, FINAL),
        (400, FINAL),  # 4xx are final
        (402, FINAL),
        (404, FINAL),
        (409, FINAL),
        (422, FINAL),
        (423, FINAL),
        (401, PROVISIONAL),  # except 401: other credentials may do
        (403, PROVISIONAL),  # 403
        (407, PROVISIONAL),  # 407
        (408, PROVISIONAL),  # 408: it timed out, nothing is known
        (425, PROVISIONAL),  # 425: too early
        (429, PROVISIONAL),  # 429: too many
        (500, PROVISIONAL),  # and 5xx
        (502, PROVISIONAL),
        (503, PROVISIONAL),
        (599, PROVISIONAL),
    ],
)
def test_what_settles_a_step_that_may_be_asked_again(effect: Effect, status: int, settles: Finality) -> None:
    assert finality(effect, status) is settles


@pytest.mark.parametrize(
    ("status", "settles"),
    [
        (200, FINAL),  # answered: 2xx
        (302, FINAL),  # 3xx
        (400, FINAL),  # 4xx
        (404, FINAL),
        (409, FINAL),
        (500, DOUBTFUL),  # 5xx: answered, but it says nothing certain; a failed attempt makes it ambiguous
        (503, DOUBTFUL),
        (408, DOUBTFUL),  # an unsettled 4xx that is not on the list of the certainly unprocessed
        (425, DOUBTFUL),
        (401, PROVISIONAL),  # not processed: 401, 403, 407, 429 may go again
        (403, PROVISIONAL),
        (407, PROVISIONAL),
        (429, PROVISIONAL),
    ],
)
def test_what_settles_a_step_that_must_not_be_repeated(status: int, settles: Finality) -> None:
    assert finality(Effect.AT_MOST_ONCE, status) is settles


@pytest.mark.parametrize(
    ("effect", "status", "rule", "settles"),
    [
        # "what the profile calls in-flight" is not final
        (Effect.IDEMPOTENT, 409, {"in_flight": {409}}, PROVISIONAL),
        (Effect.IDEMPOTENT, 422, {"in_flight": {409}}, FINAL),
        (Effect.AT_MOST_ONCE, 409, {"in_flight": {409}}, DOUBTFUL),  # the first one may yet be done
        # "5xx (final where the provider stores them)"
        (Effect.IDEMPOTENT, 500, {"stores_errors": True}, FINAL),
        (Effect.IDEMPOTENT, 429, {"stores_errors": True}, PROVISIONAL),
        (Effect.IDEMPOTENT, 503, {"stores_errors": True, "in_flight": {503}}, PROVISIONAL),
        (Effect.AT_MOST_ONCE, 500, {"stores_errors": True}, DOUBTFUL),
        # not processed: "… and what the profile lists"
        (Effect.AT_MOST_ONCE, 503, {"not_processed": {503}}, PROVISIONAL),
        (Effect.AT_MOST_ONCE, 400, {"not_processed": {400}}, PROVISIONAL),
        (Effect.AT_MOST_ONCE, 409, {"in_flight": {409}, "not_processed": {409}}, PROVISIONAL),
        (Effect.IDEMPOTENT, 400, {"not_processed": {400}}, PROVISIONAL),
    ],
)
def test_what_a_rule_says_of_statuses(
    effect: Effect, status: int, rule: dict[str, bool | set[int]], settles: Finality
) -> None:
    given = {name: value if isinstance(value, bool) else frozenset(value) for name, value in rule.items()}
    assert finality(effect, status, **given) is settles  # type: ignore[arg-type]


STATUSES = st.integers(200, 599)
LISTED = st.frozensets(st.integers(400, 599), max_size=4)


@given(st.sampled_from(Effect), STATUSES, st.booleans(), LISTED, LISTED)
def test_only_at_most_once_doubts_and_success_is_always_final(
    effect: Effect, status: int, stores: bool, in_flight: frozenset[int], not_processed: frozenset[int]
) -> None:
    settles = finality(effect, status, stores_errors=stores, in_flight=in_flight, not_processed=not_processed)
    if status < 400:
        assert settles is FINAL
    if effect is not Effect.AT_MOST_ONCE:
        assert settles is not DOUBTFUL
    if effect is Effect.AT_MOST_ONCE and settles is PROVISIONAL:
        assert status in {401, 403, 407, 429} | not_processed  # else it would be sent twice


# ---- transitions


def test_the_table_as_a_picture() -> None:
    """Every move there is. What is not here must not happen."""
    moves = {
        (before.value if before else None, event.value, after.value) for (before, event), after in TRANSITIONS.items()
    }
    assert moves == {
        (None, "intent", "sent"),
        (None, "read_recorded", "answered"),
        ("sent", "take_over", "sent"),
        ("sent", "answer", "answered"),
        ("sent", "nothing_left", "not_sent"),
        ("sent", "lost", "ambiguous"),
        ("not_sent", "intent", "sent"),
        ("answered", "intent", "sent"),
        ("answered", "read_recorded", "answered"),
        ("answered", "doubted", "ambiguous"),
        ("ambiguous", "assume_done", "answered"),
        ("not_sent", "assume_done", "answered"),  # an answer that comes late, after "send again"
        ("ambiguous", "send_again", "not_sent"),
        ("not_sent", "assume_done", "answered"),  # a late answer settles it until the next intent is written
    }


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(State)
    assert {before for before, _ in TRANSITIONS} == {None, *State}
    assert {event for _, event in TRANSITIONS} == set(Event)


@given(st.lists(st.sampled_from(Event), max_size=30))
def test_whatever_happens_an_ambiguous_step_is_never_sent_without_a_decision(events: list[Event]) -> None:
    state: State | None = None
    decided = True
    for event in events:
        after = TRANSITIONS.get((state, event))
        if after is None:
            continue
        if after is State.SENT and state is not State.SENT:
            assert decided
        if after is State.AMBIGUOUS:
            decided = False
        elif event in {Event.ASSUME_DONE, Event.SEND_AGAIN}:
            decided = True
        state = after
    assert not (state is State.SENT and not decided)


@given(st.lists(st.sampled_from(Event), max_size=30))
def test_nothing_is_answered_before_it_was_sent_but_reads(events: list[Event]) -> None:
    state: State | None = None
    sent = False
    for event in events:
        after = TRANSITIONS.get((state, event), state)
        sent = sent or after is State.SENT or event is Event.READ_RECORDED
        state = after
        assert state is None or sent


# ---- the database says the same


def listed(domain: str) -> set[str]:
    """The values that a domain of the schema allows."""
    text = "".join(path.read_text("utf-8") for path in sorted(MIGRATIONS.glob("*.sql")))
    found = re.findall(rf"DOMAIN twiceshy\.{domain} AS text CHECK \(VALUE IN \((.*?)\)\)", text, re.DOTALL)
    assert found, f"no domain {domain}"
    return set(re.findall(r"'([a-z_]+)'", found[-1]))


def test_the_checks_of_the_database_list_the_same_values() -> None:
    assert listed("step_state") == set(State)
    assert listed("effect") == set(Effect) - {Effect.PASSTHROUGH}  # never journalled
    assert listed("run_status") == set(RunStatus)
    assert listed("finality") == set(Finality)


@pytest.mark.parametrize("status", RunStatus)
def test_a_run_is_under_way_stopped_or_ended(status: RunStatus) -> None:
    assert not (status.stopped and status.ended)
    assert status.stopped == (status in {"ambiguous", "diverged", "over_budget"})
    assert status.ended == (status in {"done", "failed", "cancelled"})


def test_effects_are_the_two_whose_repetition_is_felt() -> None:
    assert {effect for effect in Effect if effect.is_effect} == {Effect.IDEMPOTENT, Effect.AT_MOST_ONCE}
