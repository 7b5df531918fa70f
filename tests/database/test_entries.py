"""What becomes of each entry: committed, or told precisely why not."""

from dataclasses import replace
from uuid import uuid4

import pytest

from runtime import runs
from runtime.entries import Begun, Bound, Conflict, Fence, Fenced, PutBack, Recorded, Stopped
from runtime.journal import Journal
from runtime.step import Effect, Finality, RunStatus, State
from tests.database.samples import DOUBTFUL, PROVISIONAL, SIDECAR, Scene, answer, claim, facts, register


async def evidence(scene: Scene, key: str = "k") -> str:
    return next(step.evidence or "" for step in await scene.call(runs.steps) if step.key == key)


# ---- the fence


async def test_a_fence_that_does_not_hold_is_told_apart_and_nothing_is_written(journal: Journal, scene: Scene) -> None:
    stranger = replace(scene.fence, token_hash=bytes(32))
    elsewhere = replace(scene.fence, sidecar="sidecar-2")
    unknown = Fence("no-such-run", scene.fence.token_hash, SIDECAR)
    await journal.bind(scene.fence)
    for fence, expected in ((stranger, Fenced()), (elsewhere, Fenced(SIDECAR)), (unknown, Fenced())):
        assert await journal.write(replace(scene.intent(), fence=fence)) == expected
        assert await journal.write(replace(scene.read(), fence=fence)) == expected
        assert await journal.write(replace(scene.stop(), fence=fence)) == expected
        assert await journal.bind(fence) == expected
        assert (await journal.renew([fence], extend=True))[fence.run_id] == expected
    assert await scene.call(runs.steps) == []
    assert await scene.status() is RunStatus.RUNNING


async def test_a_run_that_is_not_running_says_why(scene: Scene) -> None:
    await scene.write(scene.stop(key="s", message="the budget is spent"))
    stopped = Stopped(RunStatus.AMBIGUOUS, "s", "the budget is spent")
    assert await scene.write(scene.intent()) == stopped
    assert await scene.write(scene.read()) == stopped
    assert await scene.write(scene.stop(key="other")) == stopped
    assert await scene.journal.bind(scene.fence) == stopped
    await scene.end("stopped")
    assert await scene.write(scene.intent()) == Fenced()
    assert await scene.call(runs.steps) == []


async def test_a_new_claim_fences_the_old_attempt(scene: Scene) -> None:
    exchange = await scene.begin()
    after = await scene.again()
    assert await scene.write(scene.intent("k2")) == Fenced()
    assert await scene.write(scene.read()) == Fenced()
    # What truly happened is recorded.
    assert isinstance(await scene.write(scene.answer(exchange)), Recorded)
    assert isinstance(await after.write(after.intent("k2")), Begun)


async def test_the_first_entry_binds_an_attempt_that_nobody_bound(scene: Scene) -> None:
    await scene.begin()
    assert await scene.journal.bind(replace(scene.fence, sidecar="sidecar-2")) == Fenced(SIDECAR)
    assert (await scene.call(runs.last_attempt)).sidecar == SIDECAR
    assert isinstance(await scene.journal.bind(scene.fence), Bound)


# ---- intents


async def test_an_intent_begins_a_step_once(scene: Scene) -> None:
    intent = scene.intent()
    first = await scene.write(intent)
    assert isinstance(first, Begun)
    assert first.first_sent_at == first.now
    again = await scene.write(intent)
    assert isinstance(again, Begun)
    assert (again.begun, again.first_sent_at) == (first.begun, first.first_sent_at)
    assert await scene.write(scene.intent()) == Conflict()
    assert await scene.write(scene.intent("never-begun", place=1)) == Conflict()


async def test_a_step_put_back_begins_again_as_what_it_was(scene: Scene) -> None:
    intent = scene.intent()
    first = await scene.write(intent)
    assert isinstance(first, Begun)
    put_back = PutBack(scene.run_id, "k", intent.exchange)
    assert await scene.write(put_back) == Recorded(0)
    assert await scene.write(put_back) == Recorded(0)
    other = replace(scene.intent(), facts=facts(effect=Effect.IDEMPOTENT, wire_key="another", request_body=b"other"))
    second = await scene.write(other)
    assert isinstance(second, Begun)
    assert (second.begun, second.first_sent_at) == (first.begun, first.first_sent_at)
    assert await scene.write(put_back) == Conflict()
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    assert rows.steps[0].facts == intent.facts
    assert rows.steps[0].exchange == other.exchange


@pytest.mark.parametrize("last", [answer(), DOUBTFUL], ids=["final", "doubtful"])
async def test_a_settled_step_is_never_asked_again(scene: Scene, last: object) -> None:
    await scene.step(facts=last)  # type: ignore[arg-type]
    after = await scene.again()
    for place in (0, 1):
        assert await after.write(after.intent(place=place)) == Conflict()


async def test_a_provisional_answer_is_followed_or_replaced(scene: Scene) -> None:
    await scene.step(facts=PROVISIONAL)
    assert await scene.write(scene.intent(place=2)) == Conflict()
    second = await scene.begin(place=1)
    await scene.record(second, replace(PROVISIONAL, status=429))
    third = await scene.begin(place=1)
    await scene.record(third)
    assert await scene.statuses() == [503, 200]


async def test_only_the_dead_are_taken_over(journal: Journal, scene: Scene) -> None:
    exchange = await scene.begin()
    await register(journal, "sidecar-2", folder="/other")
    after = await scene.again("sidecar-2")
    assert await after.write(after.intent(replaces=exchange)) == Conflict()
    await journal.retire(SIDECAR)
    assert await after.write(after.intent(replaces=uuid4())) == Conflict()
    taken = after.intent(replaces=exchange)
    assert isinstance(await after.write(taken), Begun)
    assert isinstance(await after.write(taken), Begun)
    # What this sidecar itself had and has forgotten may be taken over by it.
    assert isinstance(await after.write(after.intent(replaces=taken.exchange)), Begun)


# ---- answers


async def test_an_answer_is_recorded_once(scene: Scene) -> None:
    exchange = await scene.begin()
    entry = scene.answer(exchange)
    first = await scene.write(entry)
    assert first == Recorded(2, 1)
    again = await scene.write(entry)
    assert isinstance(again, Recorded)
    assert again.recorded == 2
    assert await scene.statuses() == [200]
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    assert rows.steps[0].answers[0].facts == entry.facts


async def test_an_answer_of_our_own_leaves_the_step_not_sent(scene: Scene) -> None:
    exchange = await scene.begin()
    own = answer(b"unreachable", Finality.PROVISIONAL, 502, own=True)
    entry = scene.answer(exchange, own, state=State.NOT_SENT)
    assert isinstance(await scene.write(entry), Recorded)
    assert isinstance(await scene.write(entry), Recorded)
    assert await scene.state() is State.NOT_SENT
    again = await scene.begin(place=1)
    await scene.record(again)
    assert await scene.statuses() == [502, 200]


async def test_an_exchange_that_lost_its_step_leaves_evidence(journal: Journal, scene: Scene) -> None:
    lost = await scene.begin(effect=Effect.IDEMPOTENT)
    await journal.retire(SIDECAR)
    after = await scene.again("sidecar-2")
    taken = await after.begin(effect=Effect.IDEMPOTENT, replaces=lost)
    for _ in range(2):
        assert await scene.write(scene.answer(lost)) == Conflict()
    text = await evidence(scene)
    assert text.count(str(lost)) == 1
    assert "200" in text
    await after.record(taken)
    assert await scene.write(scene.answer(uuid4(), key="never-begun")) == Conflict()


# ---- stops, and what settles them


async def test_a_stop_stops_the_run_and_says_so_again(scene: Scene) -> None:
    exchange = await scene.begin()
    stop = scene.stop(exchange)
    assert await scene.write(stop) == Recorded(0)
    assert await scene.write(stop) == Recorded(0)
    assert await scene.state() is State.AMBIGUOUS
    assert await scene.status() is RunStatus.AMBIGUOUS
    assert await evidence(scene) == "the connection was lost"


async def test_a_stop_of_a_step_that_moved_on_stops_nothing(scene: Scene) -> None:
    exchange = await scene.step()
    assert await scene.write(scene.stop(exchange)) == Conflict()
    assert await scene.status() is RunStatus.RUNNING
    assert await scene.state() is State.ANSWERED


async def test_a_fenced_sidecar_may_only_say_what_became_of_its_own_exchange(journal: Journal, scene: Scene) -> None:
    exchange = await scene.begin()
    await scene.again("sidecar-2")
    foreign = replace(scene.stop(exchange), fence=replace(scene.fence, sidecar="sidecar-3"))
    assert await journal.write(foreign) == Fenced()
    assert await scene.state() is State.SENT
    assert await journal.write(scene.stop(exchange)) == Fenced()
    assert await scene.state() is State.AMBIGUOUS
    assert await scene.status() is RunStatus.RUNNING


async def test_a_late_answer_settles_the_last_open_stop(scene: Scene) -> None:
    one, two = await scene.begin("one"), await scene.begin("two")
    await scene.write(scene.stop(one, "one"))
    await scene.write(scene.stop(two, "two"))
    await scene.end("stopped")
    assert (await scene.call(runs.get_run)).stop_step == "one"
    await scene.record(one, key="one")
    row = await scene.call(runs.get_run)
    assert (row.status, row.stop_step) == (RunStatus.AMBIGUOUS, "two")
    assert row.stop_message == "the connection was lost"
    await scene.record(two, key="two")
    row = await scene.call(runs.get_run)
    assert (row.status, row.stop_step, row.stop_message) == (RunStatus.QUEUED, None, None)


async def test_a_late_answer_in_a_batch_with_what_it_settles(scene: Scene) -> None:
    """The run's status, as later entries of the batch see it, follows."""
    exchange = await scene.begin()
    await scene.write(scene.stop(exchange))
    entries = [scene.answer(exchange), scene.intent("next")]
    late, after = [await scene.write(entry) for entry in entries]
    assert isinstance(late, Recorded)
    assert after == Stopped(RunStatus.QUEUED, None, None)


async def test_the_first_of_two_effects_does_not_answer_for_the_second(scene: Scene) -> None:
    first = await scene.begin()
    await scene.write(scene.stop(first))
    await scene.call(runs.resolve, "k", "send_again")
    after = await scene.again()
    second = await after.begin()
    await after.write(after.stop(second))
    assert await scene.write(scene.answer(first)) == Conflict()
    assert await scene.state() is State.AMBIGUOUS
    assert str(first) in await evidence(scene)


async def test_one_key_makes_one_effect_whichever_exchange_answers(journal: Journal, scene: Scene) -> None:
    first = await scene.begin(effect=Effect.IDEMPOTENT)
    await journal.retire(SIDECAR)
    after = await scene.again("sidecar-2")
    second = await after.begin(effect=Effect.IDEMPOTENT, replaces=first)
    await after.write(after.stop(second))
    assert isinstance(await scene.write(scene.answer(first)), Recorded)
    assert await scene.state() is State.ANSWERED
    assert await scene.status() is RunStatus.QUEUED


# ---- reads


async def test_the_first_record_of_a_read_wins(scene: Scene) -> None:
    first = scene.read(answer(b"first"))
    assert await scene.write(first) == Recorded(2, 1)
    assert await scene.write(first) == Recorded(2, 1)
    assert await scene.write(scene.read(answer(b"second"))) == Conflict()
    assert await scene.journal.small_body(scene.run_id, "r", 0) == b"first"
    assert await scene.write(scene.read(answer(b"polled"), place=1)) == Recorded(3, 1)
    assert await scene.write(scene.read(place=3)) == Conflict()


async def test_a_provisional_read_gives_up_its_place_to_a_later_attempt_only(scene: Scene) -> None:
    await scene.write(scene.read(PROVISIONAL))
    assert await scene.write(scene.read()) == Conflict()
    after = await scene.again()
    assert isinstance(await after.write(after.read()), Recorded)
    assert await scene.statuses("r") == [200]
    assert await after.write(after.read()) == Conflict()


async def test_a_read_is_no_other_step(scene: Scene) -> None:
    await scene.step()
    assert await scene.write(scene.read(key="k", place=1)) == Conflict()


# ---- the counter


async def test_counters_follow_the_order_of_entries(scene: Scene) -> None:
    exchanges = [await scene.begin(f"k{n}") for n in range(3)]
    recorded = [await scene.record(exchange, key=f"k{n}") for n, exchange in enumerate(exchanges)]
    read = await scene.write(scene.read())
    assert [r.recorded for r in recorded] == [4, 5, 6]
    assert read == Recorded(8, 7)
    row = await scene.call(runs.get_run)
    assert (row.counter, row.newest) == (8, 7)
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    assert [step.begun for step in rows.steps] == [1, 2, 3, 7]
    other = await claim(scene.journal)
    assert await other.write(other.read()) == Recorded(2, 1)
