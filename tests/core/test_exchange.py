"""Which step a request asks for: a scenario for each sentence of the design.

Sentences are quoted from DESIGN §2 and §3.3. What surrounds the decisions is ``tests.core.world``.
"""

from dataclasses import replace

import pytest

from proxy.exchange import Arrival, Beat, Diverged, Drop, Join, NoAttempt, Replay, Send, decide
from runtime.step import RunStatus
from tests.core.scenes import LLM, MAIL, READ, REFUND, Scene, arrival, beaten, name, until
from tests.core.sidecars import Client, Stage
from tests.core.world import Fault

EACH = pytest.mark.parametrize("asked", [READ, LLM, REFUND, MAIL], ids=name)
EFFECTS = pytest.mark.parametrize("asked", [REFUND, MAIL], ids=name)
NO_READ = pytest.mark.parametrize("asked", [LLM, REFUND, MAIL], ids=name)


def occurrence(client: Client) -> int:
    return client.step.facts.occurrence


# ---- §3.3: the same step, or the next occurrence?


@EACH
def test_polling_is_the_next_occurrence_each_time(asked: Arrival) -> None:
    """After that (delivered whole): the next occurrence (polling)."""
    scene = Scene()
    lived = [scene.call(asked) for _ in range(4)]
    assert len(set(lived)) == 4
    scene.restart()
    assert [scene.call(asked) for _ in range(4)] == lived
    assert scene.upstream.calls.total() == 4


@EACH
def test_sampling_in_parallel_is_an_occurrence_each(asked: Arrival) -> None:
    """While the first one's client is attached it is a new occurrence (parallel sampling)."""
    scene = Scene()
    clients = [scene.ask(beaten(asked)) for _ in range(3)]
    assert [occurrence(client) for client in clients] == [1, 2, 3]
    lived = [scene.finish(client) for client in reversed(clients)]
    scene.restart()
    clients = [scene.ask(beaten(asked)) for _ in range(3)]
    assert sorted(scene.finish(client) for client in clients) == sorted(lived)
    assert scene.upstream.calls.total() == 3


@EFFECTS
def test_an_equal_effect_waits_one_beat_for_a_fin_on_its_way(asked: Arrival) -> None:
    """For effects: its socket peeked for EOF, one beat of 50 ms."""
    scene = Scene()
    first = scene.ask(asked)
    assert scene.decide(asked) == Beat()
    first.hang_up()
    assert scene.decide(beaten(asked)) == Join(first.step)
    scene = Scene()
    scene.ask(asked)
    assert scene.decide(asked) == Beat()
    assert isinstance(scene.decide(beaten(asked)), Send)


@pytest.mark.parametrize("asked", [READ, LLM], ids=name)
def test_what_is_no_effect_waits_for_no_beat(asked: Arrival) -> None:
    scene = Scene()
    scene.ask(asked)
    assert scene.decide(asked) == Send(None, 2, 0)


@EFFECTS
def test_who_has_gone_and_was_overtaken_asks_for_nothing_more(asked: Arrival) -> None:
    """A request that waited for the database, given up meanwhile, after the one that took its place."""
    scene = Scene()
    late = replace(beaten(asked), gone=True)
    assert scene.decide(late) == Send(None, 1, 0)  # who is the first to ask need not wait for the answer
    scene.ask(asked)
    assert scene.decide(late) == Drop()
    assert scene.decide(replace(late, explicit="its own")) == Send(None, 0, 0)
    assert scene.decide(replace(late, token=b"another", token_is_call=True)) == Send(None, 2, 0)
    scene.restart()
    scene.ask(asked)
    assert scene.decide(late) == Drop()


@NO_READ
def test_a_client_that_went_away_and_asks_again_joins_its_step(asked: Arrival) -> None:
    """If that client went away before the answer was delivered whole it is its retry: same step."""
    scene = Scene()
    first = scene.ask(asked)
    until(first, Stage.OUT)
    first.hang_up()
    assert scene.decide(asked) == Join(first.step)
    again = scene.ask(asked)
    assert scene.finish(again) == (200, f"{name(asked)} 0".encode())
    assert scene.upstream.calls.total() == 1


@NO_READ
def test_an_answer_that_came_after_its_client_had_gone_is_its_retrys(asked: Arrival) -> None:
    scene = Scene()
    first = scene.ask(asked)
    until(first, Stage.OUT)
    first.hang_up()
    assert first.exchange is not None
    first.exchange.advance()
    assert scene.decide(asked) == Replay(first.step, 0)


def test_a_read_whose_client_went_away_is_made_again_as_the_same_step() -> None:
    """Read: cancelled when its client goes, made again."""
    scene = Scene()
    first = scene.ask(READ)
    until(first, Stage.OUT)
    first.hang_up()
    assert scene.decide(READ) == Send(first.step, 1, 0)
    scene.call(READ)
    assert list(scene.journal.rows) == ["status#1"]


@EACH
def test_a_step_that_has_a_client_again_is_sought_by_nobody(asked: Arrival) -> None:
    scene = Scene()
    scene.ask(asked).hang_up()
    again = scene.ask(asked)
    assert scene.decide(beaten(asked)) == Send(None, 2, 0)
    scene.finish(again)
    assert scene.decide(asked) == Send(None, 2, 0)


@EACH
def test_a_reset_right_after_the_answer_undoes_its_delivery(asked: Arrival) -> None:
    """Delivered whole = acknowledged … and not reset before another request of the attempt began."""
    scene = Scene()
    first = scene.ask(asked)
    scene.finish(first)
    scene.sidecar.tape.undeliver(first.step, 0)
    assert scene.decide(asked) == Replay(first.step, 0)


@EACH
def test_of_two_clients_of_one_step_one_has_the_answer(asked: Arrival) -> None:
    """The late end of a client that had given up is not the end of the one that took its place."""
    scene = Scene()
    first = scene.ask(asked)
    second = scene.ask(replace(asked, again=True))
    assert second.step is first.step
    scene.finish(second)
    first.hang_up()
    assert scene.decide(asked) == Send(None, 2, 0)


@EACH
@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.LIMITED], ids=str)
def test_after_an_answer_that_is_not_final_the_step_is_open(asked: Arrival, fault: Fault) -> None:
    """A step whose last answer to this attempt was not final is open, and the next equal request takes it."""
    scene = Scene()
    assert scene.call(asked, fault)[0] in (503, 429)
    step = scene.sidecar.tape.steps[next(iter(scene.sidecar.tape.steps))]
    due = scene.decide(asked)
    assert isinstance(due, Send | Replay)
    assert due.step is step


def test_the_lowest_open_one_is_taken() -> None:
    scene = Scene()
    clients = [scene.ask(beaten(REFUND)) for _ in range(4)]
    scene.finish(clients[3], Fault.BUSY)
    scene.finish(clients[1], Fault.BUSY)
    scene.finish(clients[0])
    again = [scene.ask(beaten(REFUND)), scene.ask(beaten(REFUND)), scene.ask(beaten(REFUND))]
    assert [occurrence(client) for client in again] == [2, 4, 5]


def test_open_goes_before_gone() -> None:
    """In this order: open, else by delivery."""
    scene = Scene()
    gone, open_ = scene.ask(beaten(REFUND)), scene.ask(beaten(REFUND))
    gone.hang_up()
    scene.finish(open_, Fault.BUSY)
    assert occurrence(scene.ask(REFUND)) == 2
    assert occurrence(scene.ask(beaten(REFUND))) == 1


# ---- §3.3: a retry signal


@EACH
def test_a_retry_count_says_that_it_is_the_same_step(asked: Arrival) -> None:
    """A retry signal (x-stainless-retry-count > 0) = same step."""
    again = replace(asked, again=True)
    scene = Scene()
    client = scene.ask(asked)
    assert scene.decide(again) == Join(client.step)  # its FIN is still on its way
    answer = scene.finish(client)
    assert scene.call(again) == answer
    assert scene.upstream.calls.total() == 1


def test_a_retry_count_means_the_one_that_has_no_answer() -> None:
    """Of three samples the second one's client gave up: its retry is not given another's answer."""
    again = replace(LLM, again=True)
    for gone in (True, False):
        scene = Scene()
        clients = [scene.ask(LLM) for _ in range(3)]
        scene.finish(clients[0])
        scene.finish(clients[2])
        if gone:
            clients[1].hang_up()
        assert scene.decide(again) == Join(clients[1].step)


def test_a_retry_may_be_one_of_a_request_that_nobody_understood() -> None:
    """Its first try was held while Postgres was away, say: it has no step, and least of all an answered one."""
    again = replace(LLM, again=True, strays=True)
    scene = Scene()
    scene.call(LLM)
    assert scene.decide(again) == Send(None, 2, 0)
    attached = scene.ask(LLM)
    assert scene.decide(again) == Send(None, 3, 0)
    attached.hang_up()
    assert scene.decide(again) == Join(attached.step)


def test_a_retry_of_what_failed_is_one_whatever_nobody_understood() -> None:
    """SDKs try 409 again, which is final: the last again."""
    scene = Scene()
    client = scene.ask(LLM)
    scene.finish(client)
    step = client.step
    step.answers[0].facts = replace(step.answers[0].facts, status=409)
    assert scene.decide(replace(LLM, again=True, strays=True)) == Replay(step, 0)


def test_a_retry_count_with_nothing_to_repeat_is_a_first_request() -> None:
    """An agent restarted in the middle of an SDK's retries."""
    scene = Scene()
    assert scene.decide(replace(LLM, again=True)) == Send(None, 1, 0)


@EFFECTS
@pytest.mark.parametrize("is_call", [True, False])
def test_an_equal_random_key_is_the_same_step(asked: Arrival, is_call: bool) -> None:
    """An equal random key or invocation id seen in this attempt = same step."""
    asked = replace(asked, token=b"one", token_is_call=is_call)
    scene = Scene()
    client = scene.ask(asked)
    assert scene.decide(asked) == Join(client.step)
    answer = scene.finish(client)
    assert scene.call(asked) == answer
    assert scene.upstream.calls.total() == 1


@EFFECTS
def test_a_different_random_key_is_a_new_call_only_where_the_sdk_keeps_its_key(asked: Arrival) -> None:
    one, two = replace(asked, token=b"one"), replace(asked, token=b"two")
    for kept in (True, False):
        scene = Scene()
        client = scene.ask(replace(one, token_is_call=kept))
        client.hang_up()
        found = scene.decide(replace(two, token_is_call=kept))
        assert found == (Send(None, 2, 0) if kept else Join(client.step))


def test_a_new_call_needs_no_beat() -> None:
    """The SDK says so: there is no FIN to wait for."""
    scene = Scene()
    scene.ask(replace(REFUND, token=b"one", token_is_call=True))
    assert scene.decide(replace(REFUND, token=b"two", token_is_call=True)) == Send(None, 2, 0)


def test_a_new_process_makes_new_random_keys_for_the_same_calls() -> None:
    scene = Scene()
    lived = [scene.call(replace(REFUND, token=token, token_is_call=True)) for token in (b"1", b"2")]
    scene.restart()
    assert [scene.call(replace(REFUND, token=token, token_is_call=True)) for token in (b"3", b"4")] == lived


def test_a_key_seen_with_another_request_says_nothing() -> None:
    scene = Scene()
    scene.call(replace(REFUND, token=b"one"))
    assert scene.decide(replace(MAIL, token=b"one")) == Send(None, 1, 0)


# ---- §3.3: explicit keys, secondary prints


@EACH
def test_an_explicit_key_names_its_step(asked: Arrival) -> None:
    named = replace(asked, explicit="the one")
    scene = Scene()
    answer = scene.call(named)
    assert scene.call(named) == answer
    scene.restart()
    assert scene.call(named) == answer
    assert list(scene.journal.rows) == ["the one"]
    assert scene.journal.rows["the one"].facts.occurrence == 0


@EACH
def test_an_explicit_key_with_another_request_is_diverged(asked: Arrival) -> None:
    """Same explicit key, other fingerprint: diverged."""
    scene = Scene()
    scene.call(replace(asked, explicit="the one"))
    other = replace(arrival("other"), explicit="the one")
    due = scene.decide(other)
    assert isinstance(due, Diverged)
    assert scene.sidecar.ask(other) is RunStatus.DIVERGED
    assert scene.journal.status is RunStatus.DIVERGED


def test_a_named_step_is_no_occurrence() -> None:
    scene = Scene()
    scene.call(replace(REFUND, explicit="the one"))
    assert occurrence(scene.ask(REFUND)) == 1


def test_two_requests_at_once_under_one_name_are_one() -> None:
    scene = Scene()
    client = scene.ask(replace(MAIL, explicit="the one"))
    assert scene.decide(replace(MAIL, explicit="the one")) == Join(client.step)


@EACH
def test_the_one_whose_secondary_print_is_equal_is_taken_else_the_lowest(asked: Arrival) -> None:
    alice, bob, carol = (replace(asked, secondary=who.ljust(16).encode()) for who in ("alice", "bob", "carol"))
    scene = Scene()
    to_alice, to_bob = scene.call(alice), scene.call(bob)
    scene.restart()
    assert [scene.call(bob), scene.call(alice)] == [to_bob, to_alice]
    scene.restart()
    assert [scene.call(carol), scene.call(carol)] == [to_alice, to_bob]
    assert occurrence(scene.ask(beaten(carol))) == 3


# ---- §2: a run named without a token


TOKENLESS_LLM, TOKENLESS_REFUND, TOKENLESS_MAIL, TOKENLESS_READ = (
    replace(asked, tokenless=True) for asked in (LLM, REFUND, MAIL, READ)
)


@pytest.mark.parametrize("asked", [TOKENLESS_REFUND, TOKENLESS_MAIL], ids=name)
def test_an_equal_effect_in_one_living_process_is_refused(asked: Arrival) -> None:
    """So does, inside one living process, an equal effect that would be a new occurrence."""
    scene = Scene()
    scene.call(asked)
    assert isinstance(scene.decide(asked), NoAttempt)
    scene = Scene()
    scene.ask(asked)
    assert scene.decide(asked) == Beat()
    assert isinstance(scene.decide(beaten(asked)), NoAttempt)


def test_a_retry_is_no_new_occurrence() -> None:
    scene = Scene()
    scene.ask(TOKENLESS_REFUND).hang_up()
    assert isinstance(scene.decide(TOKENLESS_REFUND), Join)
    scene = Scene()
    scene.call(TOKENLESS_REFUND, Fault.BUSY)
    assert isinstance(scene.decide(TOKENLESS_REFUND), Send)


def test_an_equal_effect_that_is_named_is_not_refused() -> None:
    """The refusal names the ways out: Twiceshy-Step."""
    scene = Scene()
    scene.call(TOKENLESS_REFUND)
    assert isinstance(scene.decide(replace(TOKENLESS_REFUND, explicit="second")), Send)


@pytest.mark.parametrize("asked", [TOKENLESS_READ, TOKENLESS_LLM], ids=name)
def test_reads_and_llm_calls_may_be_repeated(asked: Arrival) -> None:
    scene = Scene()
    for n in range(3):
        client = scene.ask(asked)
        assert occurrence(client) == n + 1
        scene.finish(client)


@pytest.mark.parametrize("heard", [True, False])
def test_after_a_repetition_every_further_effect_is_refused_once_one_was_answered(heard: bool) -> None:
    """A task retried in one Celery worker: it begins with its LLM call again."""
    scene = Scene()
    scene.call(TOKENLESS_LLM)
    client = scene.ask(TOKENLESS_REFUND)
    if heard:
        scene.finish(client)
    else:  # the task gave up, the refund was made all the same
        until(client, Stage.OUT)
        client.hang_up()
        assert client.exchange is not None
        client.exchange.advance()
    scene.call(TOKENLESS_LLM)
    assert isinstance(scene.decide(TOKENLESS_MAIL), NoAttempt)
    assert isinstance(scene.decide(TOKENLESS_REFUND), NoAttempt)
    assert isinstance(scene.decide(replace(TOKENLESS_MAIL, explicit="mail")), Send)
    assert isinstance(scene.decide(TOKENLESS_READ), Send)


def test_nor_while_the_first_one_is_on_its_way() -> None:
    """The task gave up on it, and begins anew; whether it was made will be known later."""
    scene = Scene()
    scene.call(TOKENLESS_LLM)
    client = scene.ask(TOKENLESS_REFUND)
    until(client, Stage.OUT)
    client.hang_up()
    scene.call(TOKENLESS_LLM)
    assert isinstance(scene.decide(TOKENLESS_MAIL), NoAttempt)
    assert isinstance(scene.decide(TOKENLESS_REFUND), Join)


def test_samples_taken_in_parallel_are_no_repetition() -> None:
    scene = Scene()
    clients = [scene.ask(TOKENLESS_LLM) for _ in range(3)]
    for client in clients:
        scene.finish(client)
    scene.call(TOKENLESS_REFUND)
    assert isinstance(scene.decide(TOKENLESS_MAIL), Send)


def test_with_a_token_a_repetition_is_nobodys_business() -> None:
    scene = Scene()
    for asked in (LLM, REFUND, LLM, REFUND, MAIL):
        assert scene.call(asked)[0] == 200


# ---- deciding changes nothing


def test_deciding_changes_nothing() -> None:
    scene = Scene()
    scene.call(REFUND, Fault.BUSY)
    scene.restart()
    before = scene.sidecar.tape.steps["refund#1"]
    copy = replace(before)
    for _ in range(3):
        assert scene.decide(REFUND) == decide(scene.sidecar.tape, REFUND, scene.journal.now)
    assert before == copy
