"""What is due for the step that a request asks for: replay, join, wait, or the next answer of its list.

Sentences are quoted from DESIGN §3.4 and §3.8.
"""

from dataclasses import replace

import pytest

from proxy.exchange import Arrival, Join, Replay, Send, Wait
from runtime.step import Effect, RunStatus, State
from tests.core.scenes import LLM, MAIL, READ, REFUND, Scene, arrival, name, until
from tests.core.sidecars import Stage
from tests.core.world import Fault

EACH = pytest.mark.parametrize("asked", [READ, LLM, REFUND, MAIL], ids=name)
EFFECTS = pytest.mark.parametrize("asked", [REFUND, MAIL], ids=name)
NO_READ = pytest.mark.parametrize("asked", [LLM, REFUND, MAIL], ids=name)


# ---- §3.4: replay, or the last again


@EACH
def test_answers_are_replayed_in_their_order(asked: Arrival) -> None:
    """The retry joins the step: its answers make a list, replayed in that order."""
    scene = Scene()
    lived = [scene.call(asked, Fault.LIMITED), scene.call(asked)]
    assert [status for status, _ in lived] == [429, 200]
    for _ in range(2):
        scene.restart()
        assert [scene.call(asked), scene.call(asked)] == lived
    assert scene.upstream.calls.total() == 2


@EACH
def test_a_final_answer_is_given_again_when_the_same_step_is_asked(asked: Arrival) -> None:
    """Has answers and this attempt has had them all: final: the last again."""
    named = replace(asked, explicit="the one")
    scene = Scene()
    lived = [scene.call(named, Fault.LIMITED), scene.call(named)]
    assert scene.call(named) == lived[1]
    scene.restart()
    assert [scene.call(named) for _ in range(4)] == [*lived, lived[1], lived[1]]


@pytest.mark.parametrize("asked", [READ, LLM, REFUND], ids=name)
def test_an_answer_that_is_not_final_is_asked_again_and_the_new_one_takes_its_place(asked: Arrival) -> None:
    """Not final: send again under the same key, and the new answer takes its place in the list."""
    scene = Scene()
    scene.call(asked, Fault.BUSY)
    scene.call(asked, Fault.BUSY)
    scene.call(asked)
    rows = list(scene.journal.rows.values())
    assert len(rows) == 1
    assert [answer.facts.status for answer in rows[0].answers] == [503, 503, 200]
    assert len(scene.upstream.bodies) <= 1


def test_an_answer_in_doubt_is_repeated_and_never_asked_again() -> None:
    """At_most_once after a 5xx: an equal request joins and gets the same answer, never a new occurrence."""
    scene = Scene()
    lived = [scene.call(MAIL, Fault.FAILED), scene.call(MAIL), scene.call(MAIL)]
    assert [status for status, _ in lived] == [503, 503, 503]
    assert scene.upstream.calls.total() == 1
    scene.restart("interrupted")
    assert scene.call(MAIL) == lived[0]
    assert scene.call(MAIL) == lived[0]
    assert scene.upstream.calls.total() == 1
    assert list(scene.journal.rows) == ["mail#1"]


def test_an_answer_in_doubt_becomes_a_question_when_the_attempt_fails_after_it() -> None:
    scene = Scene()
    scene.call(MAIL, Fault.FAILED)
    scene.restart("failed")
    assert (scene.journal.status, scene.journal.stop_step) == (RunStatus.AMBIGUOUS, "mail#1")


def test_send_again_after_an_answer_in_doubt() -> None:
    """A person says that it did not happen: the answer in doubt is none any more."""
    scene = Scene()
    scene.call(MAIL, Fault.BUSY)
    scene.restart("failed")
    scene.journal.resolve("mail#1", "send_again")
    scene.restart()
    assert scene.call(MAIL)[0] == 200
    assert [answer.facts.status for answer in scene.journal.rows["mail#1"].answers] == [200]
    assert scene.upstream.done("mail") == 1


def test_assume_done_after_an_answer_in_doubt() -> None:
    scene = Scene()
    answer = scene.call(MAIL, Fault.FAILED)
    scene.restart("failed")
    scene.journal.resolve("mail#1", "assume_done")
    scene.restart()
    assert scene.call(MAIL) == answer
    assert scene.upstream.calls.total() == 1


def test_send_again_only_settles_the_answer_in_doubt() -> None:
    """What the agent was told before stays what it was told."""
    scene = Scene()
    scene.call(MAIL, Fault.LIMITED)
    scene.call(arrival("acted"))
    scene.call(MAIL, Fault.BUSY)
    scene.restart("failed")
    scene.journal.resolve("mail#1", "send_again")
    scene.restart()
    assert [scene.call(MAIL)[0], scene.call(arrival("acted"))[0], scene.call(MAIL)[0]] == [429, 200, 200]


@pytest.mark.parametrize("fault", [Fault.LIMITED, Fault.REFUSED], ids=str)
def test_what_was_not_processed_may_go_again(fault: Fault) -> None:
    """At_most_once, not processed (never sent; 401, 403, 407, 429): may go again."""
    scene = Scene()
    assert scene.call(MAIL, fault)[0] in (429, 502)
    assert scene.call(MAIL)[0] == 200
    assert len(scene.journal.rows["mail#1"].answers) == 2
    assert scene.upstream.done("mail") == 1


def test_a_502_of_our_own_before_the_first_byte_leaves_the_step_free() -> None:
    """Unreachable 502 … before the first byte they are not_sent."""
    scene = Scene()
    scene.call(MAIL, Fault.REFUSED)
    row = scene.journal.rows["mail#1"]
    assert (row.state, row.answers[0].facts.own) == (State.NOT_SENT, True)
    scene.restart()
    due = scene.decide(MAIL)
    assert isinstance(due, Send)
    assert due.place == 0  # nothing was built on it
    scene.call(MAIL)
    assert [answer.facts.status for answer in row.answers] == [200]


# ---- §3.8: a trailing answer that is not final, in the next attempt


@EACH
def test_a_trailing_answer_is_tried_again_in_the_next_attempt(asked: Arrival) -> None:
    """Only the last, if not final, is tried again when no journalled step but reads began after its delivery."""
    scene = Scene()
    scene.call(asked, Fault.LIMITED)
    scene.call(asked, Fault.LIMITED)
    scene.call(arrival("other read", Effect.READ))
    scene.restart()
    assert [scene.call(asked)[0], scene.call(asked)[0]] == [429, 200]
    assert [answer.facts.status for answer in scene.journal.rows[f"{name(asked)}#1"].answers] == [429, 200]


@EACH
def test_an_answer_that_was_acted_on_is_the_same_on_replay(asked: Arrival) -> None:
    """A 503 that the agent acted on is a 503 on replay; asked again afterwards, it goes again."""
    scene = Scene()
    lived = [scene.call(asked, Fault.LIMITED), scene.call(arrival("fallback"))]
    scene.restart()
    assert [scene.call(asked), scene.call(arrival("fallback"))] == lived
    assert scene.upstream.calls[name(asked)] == 1
    assert scene.call(asked)[0] == 200


def test_an_answer_is_not_tried_again_within_its_own_attempt_unheard() -> None:
    """It came when its client had gone: the retry is given it."""
    scene = Scene()
    client = scene.ask(REFUND)
    until(client, Stage.OUT, Fault.BUSY)
    client.hang_up()
    assert client.exchange is not None
    client.exchange.advance()
    assert scene.decide(REFUND) == Replay(client.step, 0)
    assert [scene.call(REFUND)[0], scene.call(REFUND)[0]] == [503, 200]


def test_an_answer_that_was_waited_for_is_given_whoever_asked_for_it_first() -> None:
    """The exchange is of the attempt before; its answer came in this one, and another client may be given it yet."""
    for asked in (LLM, REFUND, MAIL):
        named = replace(asked, explicit="the one")
        scene = Scene()
        until(scene.ask(named), Stage.OUT, Fault.LIMITED)
        scene.restart()
        joined = scene.ask(named)
        assert joined.exchange is not None
        joined.exchange.advance()
        assert scene.decide(named) == Replay(joined.step, 0)


def test_when_an_attempt_that_replayed_it_failed_without_a_new_step_it_is_tried_again() -> None:
    scene = Scene()
    scene.call(REFUND, Fault.BUSY)
    scene.call(arrival("fallback"))
    scene.restart("failed")
    assert scene.call(REFUND)[0] == 503
    scene.restart("failed")
    assert scene.sidecar.tape.last_failed_barren
    assert scene.call(REFUND)[0] == 200


def test_a_kill_is_no_failure() -> None:
    """An agent killed over and over before its first new step is told the same each time."""
    scene = Scene()
    lived = [scene.call(REFUND, Fault.BUSY), scene.call(arrival("fallback"))]
    for _ in range(3):
        scene.restart("died")
        assert scene.call(REFUND) == lived[0]
    assert scene.call(arrival("fallback")) == lived[1]


def test_a_step_of_this_attempt_counts_as_acted_on() -> None:
    """Branches: what began in this attempt may rest on what the last one was told."""
    scene = Scene()
    scene.call(REFUND, Fault.BUSY)
    scene.restart()
    scene.call(arrival("new"))
    assert scene.call(REFUND)[0] == 503


# ---- §3.4: in flight


@NO_READ
def test_in_flight_here_and_of_an_earlier_attempt_is_joined(asked: Arrival) -> None:
    scene = Scene()
    client = scene.ask(asked)
    until(client, Stage.OUT)
    scene.restart()
    due = scene.decide(asked)
    assert isinstance(due, Join)
    assert scene.call(asked)[0] == 200
    assert scene.upstream.calls.total() == 1


@NO_READ
def test_an_exchange_that_has_not_written_its_intent_never_sends(asked: Arrival) -> None:
    """Its attempt is over: the intent is fenced. Else the next attempt, which does not know of it, sends one more."""
    for first in (True, False):
        scene = Scene()
        old = scene.ask(asked)
        scene.restart()
        new = scene.ask(asked)
        assert old.exchange is not None
        if first:
            old.exchange.advance()
        assert scene.finish(new)[0] == 200
        if not first:
            old.exchange.advance()
        assert old.exchange.stage is Stage.OVER
        assert scene.upstream.calls.total() == 1


@EACH
def test_what_was_given_before_the_exchange_under_way_is_replayed_first(asked: Arrival) -> None:
    scene = Scene()
    scene.call(asked, Fault.LIMITED)
    client = scene.ask(asked)
    until(client, Stage.OUT)
    scene.restart()
    due = scene.decide(asked)
    if asked.effect is Effect.READ:  # it was cancelled with its client
        assert isinstance(due, Send)
        return
    assert isinstance(due, Replay)
    assert scene.call(asked)[0] == 429
    assert isinstance(scene.decide(asked), Join)
    assert scene.call(asked)[0] == 200
    assert scene.upstream.calls.total() == 2


@NO_READ
def test_in_flight_in_another_live_sidecar_is_waited_for_then_replayed(asked: Arrival) -> None:
    scene = Scene()
    client = scene.ask(asked)
    until(client, Stage.OUT)
    scene.another_sidecar()
    scene.restart()
    assert isinstance(scene.decide(asked), Wait)
    assert isinstance(scene.decide(asked), Wait)
    assert client.exchange is not None
    client.exchange.advance()
    assert isinstance(scene.decide(asked), Replay)
    assert scene.call(asked)[0] == 200
    assert scene.upstream.calls.total() == 1


# ---- §4: drift


def test_a_new_step_in_place_of_a_known_one_is_drift() -> None:
    """New … LLM calls pass, counted as drift."""
    scene = Scene()
    scene.call(LLM)
    scene.call(REFUND)
    scene.restart()
    scene.call(arrival("other", Effect.REPEATABLE))
    assert scene.sidecar.tape.drift == 1
    scene.call(REFUND)
    scene.call(LLM)
    scene.call(arrival("further", Effect.REPEATABLE))
    assert scene.sidecar.tape.drift == 1
