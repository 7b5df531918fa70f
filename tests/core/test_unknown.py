"""What was sent and whose fate nobody knows, and what goes out again.

Sentences are quoted from DESIGN §3.4, §3.6 and §9.
"""

from dataclasses import replace

import pytest

from proxy.exchange import Ambiguous, Arrival, Mode, Send
from runtime.step import RunStatus, State
from tests.core.scenes import LLM, MAIL, READ, REFUND, Scene, name, until
from tests.core.sidecars import Stage
from tests.core.world import DAY, Fault

EACH = pytest.mark.parametrize("asked", [READ, LLM, REFUND, MAIL], ids=name)
EFFECTS = pytest.mark.parametrize("asked", [REFUND, MAIL], ids=name)
NO_READ = pytest.mark.parametrize("asked", [LLM, REFUND, MAIL], ids=name)


# ---- §3.4: unknown


def unknown(asked: Arrival, mode: Mode = "durable") -> Scene:
    """A scene in which *asked* was sent by a sidecar that is dead."""
    scene = Scene(mode)
    until(scene.ask(asked, b"first"), Stage.OUT)
    scene.crash()
    return scene


def test_unknown_and_repeatable_is_sent_again_and_counted_as_drift() -> None:
    scene = unknown(LLM)
    due = scene.decide(LLM)
    assert isinstance(due, Send)
    assert (due.drift, due.first, due.replaces) == (True, False, scene.journal.rows["llm#1"].exchange)
    assert scene.call(LLM)[0] == 200
    assert scene.sidecar.tape.drift == 1


def test_unknown_and_idempotent_is_sent_again_as_it_was_under_the_same_key() -> None:
    """Send again the first bytes with the same key."""
    scene = unknown(REFUND)
    assert scene.call(REFUND, body=b"in other words")[0] == 200
    assert scene.upstream.calls["refund"] == 2
    assert scene.upstream.bodies == {"key of refund#1": b"first"}
    assert scene.upstream.done("refund") == 1


def test_unknown_and_at_most_once_stops_the_run() -> None:
    scene = unknown(MAIL)
    due = scene.decide(MAIL)
    assert isinstance(due, Ambiguous)
    assert scene.stopped(MAIL)
    assert scene.journal.rows["mail#1"].state is State.AMBIGUOUS
    scene.journal.resolve("mail#1", "assume_done")
    scene.restart()
    assert scene.call(MAIL) == (200, b"a person's")
    assert scene.upstream.calls["mail"] == 1


def test_an_ambiguous_step_stays_so_for_whoever_asks() -> None:
    scene = unknown(MAIL)
    assert scene.stopped(MAIL)
    scene.sidecar.refresh()
    assert isinstance(scene.decide(MAIL), Ambiguous)
    assert isinstance(scene.decide(replace(MAIL, again=True)), Ambiguous)


def test_send_again_goes_out_when_the_next_attempt_asks() -> None:
    """Goes out when the next attempt asks: credentials are not stored."""
    scene = unknown(MAIL)
    assert scene.stopped(MAIL)
    scene.journal.resolve("mail#1", "send_again")
    assert scene.upstream.calls["mail"] == 1
    scene.restart()
    assert scene.call(MAIL, body=b"in other words")[0] == 200
    assert scene.upstream.calls["mail"] == 2
    assert scene.upstream.bodies == {"key of mail#1": b"first"}


@pytest.mark.parametrize("retention", [DAY, 3600.0, 300.0])
def test_a_key_is_trusted_for_less_than_its_retention(retention: float) -> None:
    """If younger than the key's retention less a margin, else as at_most_once."""
    asked = replace(REFUND, retention=retention)
    for age, sent in ((0.0, True), (0.8, True), (0.99, False), (1.0, False), (3.0, False)):
        scene = unknown(asked)
        scene.journal.now += retention * age
        assert isinstance(scene.decide(asked), Send if sent else Ambiguous)


def test_retention_counts_from_the_first_sending() -> None:
    scene = Scene()
    scene.call(REFUND, Fault.BUSY)
    scene.journal.now += 0.6 * DAY
    until(scene.ask(REFUND), Stage.OUT)
    scene.crash()
    scene.call(REFUND)  # the 503
    assert isinstance(scene.decide(REFUND), Send)
    scene.journal.now += 0.6 * DAY
    assert isinstance(scene.decide(REFUND), Ambiguous)


@pytest.mark.parametrize("asked", [LLM, REFUND], ids=name)
def test_what_was_tried_again_and_lost_keeps_its_place(asked: Arrival) -> None:
    """A trailing answer gave up its place to what was lost: the next one stands there, and nowhere else."""
    scene = Scene()
    scene.call(asked, Fault.LIMITED)
    scene.restart()
    until(scene.ask(asked), Stage.OUT)
    scene.crash()
    assert scene.call(asked)[0] == 200
    assert [answer.facts.status for answer in scene.journal.rows[f"{name(asked)}#1"].answers] == [200]


def test_a_signed_request_is_never_sent_late() -> None:
    """Signed requests are never rewritten and never sent late: as at_most_once."""
    scene = unknown(replace(REFUND, signed=True))
    assert isinstance(scene.decide(replace(REFUND, signed=True)), Ambiguous)
    scene = unknown(replace(LLM, signed=True))
    due = scene.decide(replace(LLM, signed=True))
    assert isinstance(due, Send)
    assert not due.first


def test_an_exchange_that_left_no_trace_in_this_sidecar_is_unknown() -> None:
    """Sent … by this one with no exchange in memory: unknown. Nobody would ever end the wait for it."""
    for asked, expected in ((LLM, Send), (REFUND, Send), (MAIL, Ambiguous)):
        scene = Scene()
        until(scene.ask(asked), Stage.OUT)
        scene.sidecar.exchanges.clear()  # its task failed
        scene.restart()
        assert isinstance(scene.decide(asked), expected)


def test_an_answer_that_comes_late_settles_what_is_ambiguous() -> None:
    """An answer that comes late settles it, also after send_again until the second intent is written."""
    for how in (None, "send_again"):
        scene = Scene()
        client = scene.ask(MAIL)
        until(client, Stage.OUT)
        scene.journal.dead.add(scene.sidecar.id)  # judged dead; it is not
        scene.another_sidecar()
        scene.restart()
        assert scene.stopped(MAIL)
        if how:
            scene.journal.resolve("mail#1", how)
        assert client.exchange is not None
        client.exchange.advance()
        assert scene.journal.rows["mail#1"].state is State.ANSWERED
        assert scene.journal.status is RunStatus.QUEUED
        scene.restart()
        assert scene.call(MAIL) == (200, b"mail 0")
        assert scene.upstream.calls["mail"] == 1


def test_an_answer_that_comes_after_the_second_intent_is_too_late() -> None:
    scene = Scene()
    client = scene.ask(MAIL)
    until(client, Stage.OUT)
    scene.journal.dead.add(scene.sidecar.id)
    scene.another_sidecar()
    scene.restart()
    assert scene.stopped(MAIL)
    scene.journal.resolve("mail#1", "send_again")
    scene.restart()
    second = scene.ask(MAIL)
    until(second, Stage.INTENDED)
    assert client.exchange is not None
    client.exchange.advance()
    assert scene.finish(second) == (200, b"mail 1")


# ---- §3.6: what goes again is what went first


@pytest.mark.parametrize("asked", [REFUND, MAIL], ids=name)
@pytest.mark.parametrize("later", [False, True])
def test_what_goes_again_is_what_went_first_byte_for_byte(asked: Arrival, later: bool) -> None:
    """Equal but for what a rule ignores, and under the same key: the upstream would see another body."""
    scene = Scene()
    scene.call(asked, Fault.LIMITED, body=b"at 12:01")
    if later:
        scene.restart()
    assert scene.call(asked, body=b"at 12:05")[0] == 200
    assert scene.upstream.bodies == {f"key of {name(asked)}#1": b"at 12:01"}


def test_signed_and_readable_requests_go_as_they_are() -> None:
    scene = Scene()
    signed = replace(REFUND, signed=True)
    for asked in (signed, LLM, READ):
        scene.call(asked, Fault.LIMITED)
        due = scene.decide(asked)
        assert isinstance(due, Send)
        assert not due.first


def test_a_step_that_nobody_wrote_down_has_no_first_bytes() -> None:
    """Its intent was refused: the database was away."""
    scene = Scene()
    client = scene.ask(REFUND)
    assert client.exchange is not None
    client.exchange.stage = Stage.OVER
    scene.sidecar.settled(client.exchange)
    client.hang_up()
    assert scene.decide(REFUND) == Send(client.step, 1, 0)


# ---- §9: the mode for comparison


@NO_READ
def test_in_journal_mode_an_unknown_outcome_is_simply_sent_again(asked: Arrival) -> None:
    scene = unknown(asked, "journal")
    assert scene.call(asked)[0] == 200
    assert scene.upstream.calls.total() == 2
    assert scene.upstream.bodies == {}
    assert scene.sidecar.tape.drift == 1
