"""A run's index: complete, from one moment, and closed to what is not understood."""

import asyncio
import random
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from runtime import runs
from runtime.database import connect
from runtime.entries import Recorded, TapeRows
from runtime.errors import NotFound, Unreadable
from runtime.journal import Journal
from runtime.step import Effect, RunStatus, State
from tests.database.samples import PROVISIONAL, SETTINGS, SIDECAR, Scene, answer, claim, opened, register

LARGE = SETTINGS.index_body + 1


async def loaded(scene: Scene) -> TapeRows:
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    return rows


async def test_the_index_says_all_that_is_known(journal: Journal, scene: Scene) -> None:
    assert await journal.load("no-such-run") is None
    await journal.bind(scene.fence)
    intent = scene.intent("sent", Effect.IDEMPOTENT, explicit=True, occurrence=0)
    await scene.write(intent)
    await scene.step("answered", facts=PROVISIONAL)
    read = scene.read()
    await scene.write(read)
    rows = await loaded(scene)
    run = await scene.call(runs.get_run)
    assert (rows.run_id, rows.uuid, rows.attempt) == (scene.run_id, run.uuid, 1)
    assert (rows.token_hash, rows.status, rows.sidecar) == (scene.fence.token_hash, RunStatus.RUNNING, SIDECAR)
    assert 0 < rows.lease_left <= 30
    assert not rows.last_failed_barren
    sent, answered, read_step = rows.steps
    assert sent.facts == intent.facts
    assert (sent.state, sent.exchange, sent.sidecar, sent.sidecar_dead) == (State.SENT, intent.exchange, SIDECAR, False)
    assert sent.answers == []
    assert (answered.state, answered.exchange, answered.sidecar) == (State.ANSWERED, None, None)
    assert answered.answers[0].facts == PROVISIONAL
    assert (answered.attempt, answered.answers[0].attempt, answered.answers[0].recorded) == (1, 1, 3)
    assert read_step.facts == read.facts
    assert read_step.answers[0].facts == read.answer


async def test_a_stopped_run_is_loaded_with_its_stop(scene: Scene) -> None:
    await scene.write(scene.stop(key="s"))
    rows = await loaded(scene)
    assert (rows.status, rows.stop_step, rows.stop_message) == (RunStatus.AMBIGUOUS, "s", "nobody knows")
    await scene.end("stopped")
    rows = await loaded(scene)
    assert rows.token_hash is None
    assert rows.lease_left < 0


async def test_the_index_is_from_one_moment(dsn: str, scene: Scene) -> None:
    """While another writes steps, an answer is never seen without its step, nor a step answered without it."""
    done = asyncio.Event()

    async def write() -> None:
        async with opened(dsn) as other:
            writer = Scene(other, scene.run_id, scene.fence, scene.n)
            for n in range(60):
                await writer.step(f"k{n}")
        done.set()

    writing = asyncio.create_task(write())
    seen = 0
    while not done.is_set():
        rows = await loaded(scene)
        assert len(rows.steps) >= seen
        seen = len(rows.steps)
    await writing
    assert len((await loaded(scene)).steps) == 60


# ---- bodies


async def test_large_bodies_stay_in_the_database(journal: Journal, scene: Scene) -> None:
    body = random.Random(2).randbytes(LARGE)
    exchange = await scene.begin(request_body=body)
    await scene.record(exchange, answer(body))
    step = (await loaded(scene)).steps[0]
    assert (step.request_loaded, step.facts.request_body) == (False, b"")
    assert (step.answers[0].facts.body, step.answers[0].facts.size) == (None, LARGE)
    assert await journal.request_body(scene.run_id, "k") == body
    assert await journal.small_body(scene.run_id, "k", 0) == body
    with pytest.raises(NotFound):
        await journal.request_body(scene.run_id, "other")
    with pytest.raises(Unreadable):
        await journal.small_body(scene.run_id, "k", 1)


@pytest.mark.parametrize("state", [State.SENT, State.NOT_SENT, State.AMBIGUOUS, State.ANSWERED])
async def test_what_may_go_out_again_is_loaded_however_large(scene: Scene, state: State) -> None:
    body = random.Random(3).randbytes(LARGE)
    exchange = await scene.begin(request_body=body)
    if state is State.ANSWERED:
        await scene.record(exchange, PROVISIONAL)
    elif state is State.AMBIGUOUS:
        await scene.write(scene.stop(exchange))
    elif state is State.NOT_SENT:
        await scene.write(scene.stop(exchange))
        await scene.call(runs.resolve, "k", "send_again")
    step = (await loaded(scene)).steps[0]
    assert step.state is state
    assert step.request_loaded
    assert step.facts.request_body == body


async def test_a_body_in_pieces(journal: Journal, scene: Scene) -> None:
    pieces = [bytes([n]) * 70_000 for n in range(5)]
    body_id = uuid4()
    for _ in range(2):
        for n, piece in enumerate(pieces):
            await journal.put_part(scene.run_id, body_id, n, piece)
    exchange = await scene.begin()
    await scene.record(exchange, answer(None, body_id=body_id, size=350_000))
    assert (await loaded(scene)).steps[0].answers[0].facts.body_id == body_id
    assert [piece async for piece in journal.parts(scene.run_id, body_id)] == pieces
    with pytest.raises(Unreadable):
        _ = [piece async for piece in journal.parts(scene.run_id, uuid4())]
    async with journal.connection() as connection:
        await connection.execute("DELETE FROM twiceshy.body WHERE part = 2")
    with pytest.raises(Unreadable, match="4 of 5"):
        _ = [piece async for piece in journal.parts(scene.run_id, body_id)]


async def test_every_byte_comes_back(scene: Scene) -> None:
    every = bytes(range(256))
    await scene.write(scene.read(answer(every, headers=((b"A", every.replace(b"\r", b"").replace(b"\n", b"")),) * 2)))
    step = (await loaded(scene)).steps[0]
    assert step.answers[0].facts.body == every
    assert step.answers[0].facts.headers[1][1] == every.replace(b"\r", b"").replace(b"\n", b"")
    empty = scene.read(answer(b"", headers=()), key="empty")
    assert isinstance(await scene.write(empty), Recorded)
    nothing = scene.read(answer(None, headers=()), key="nothing")
    assert isinstance(await scene.write(nothing), Recorded)
    assert [step.answers[0].facts.body for step in (await loaded(scene)).steps[1:]] == [b"", b""]


# ---- sidecars that have exchanges


async def test_a_sidecar_is_dead_when_it_ended_or_was_never_there(journal: Journal, scene: Scene) -> None:
    await scene.begin("mine")
    other = await scene.again("stranger")
    await other.begin("theirs")
    assert [step.sidecar_dead for step in (await loaded(scene)).steps] == [False, True]
    await journal.retire(SIDECAR)
    assert [step.sidecar_dead for step in (await loaded(scene)).steps] == [True, True]


async def test_a_silent_sidecar_is_dead_only_by_time_with_the_database(dsn: str) -> None:
    settings = SETTINGS.model_copy(update={"lease": 1000.0})
    async with opened(dsn, settings) as journal:
        await register(journal)
        scene = await claim(journal)
        await scene.begin()
        async with journal.connection() as connection:
            await connection.execute("UPDATE twiceshy.sidecar SET expires_at = now() - interval '1 hour'")
        # Its lease is over, but neither server nor judge have been there for a lease.
        assert not (await loaded(scene)).steps[0].sidecar_dead
        journal._writer.connected = None
        assert not (await loaded(scene)).steps[0].sidecar_dead
    async with opened(dsn, settings.model_copy(update={"lease": 0.01})) as journal:
        assert journal._writer.connected is not None
        journal._writer.connected -= timedelta(seconds=1)
        rows = await journal.load(scene.run_id)
        assert rows is not None
        assert rows.steps[0].sidecar_dead


# ---- what is not understood


DAMAGE = {
    "an unknown state": "UPDATE twiceshy.step SET state = 'dreaming'",
    "an unknown effect": "UPDATE twiceshy.step SET effect = 'magic'",
    "an unknown kind": "UPDATE twiceshy.step SET kind = 'dance'",
    "a short fingerprint": "UPDATE twiceshy.step SET fingerprint = '\\x00'",
    "an unknown finality": "UPDATE twiceshy.answer SET finality = 'perhaps'",
    "an unknown status": "UPDATE twiceshy.run SET status = 'asleep'",
    "cut headers": "UPDATE twiceshy.answer SET headers = '\\x41'",
    "odd headers": "UPDATE twiceshy.answer SET headers = '\\x410d0a'",
    "a lost body": "UPDATE twiceshy.answer SET body = NULL",
    "a cut body": "UPDATE twiceshy.answer SET body = substr(body, 1, 2)",
    "a lost answer": "DELETE FROM twiceshy.answer WHERE n = 0",
    "a lost last answer": "DELETE FROM twiceshy.answer",
    "a lost step": "DELETE FROM twiceshy.step",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE.keys())
async def test_what_is_not_understood_is_never_taken_for_not_there(dsn: str, scene: Scene, statement: str) -> None:
    await scene.step(facts=PROVISIONAL)
    await scene.record(await scene.begin(place=1))
    connection = await connect(dsn, name="test")
    try:
        # As a newer version, or a disk, might leave it.
        for domain in ("step_state", "step_kind", "effect", "finality", "run_status", "bytes_32"):
            await connection.execute(f"ALTER DOMAIN twiceshy.{domain} DROP CONSTRAINT {domain}_check")
        await connection.execute(statement)
    finally:
        await connection.close()
    with pytest.raises(Unreadable, match=scene.run_id):
        await scene.journal.load(scene.run_id)


async def test_a_fence_of_an_unknown_status_does_not_hold(dsn: str, scene: Scene) -> None:
    connection = await connect(dsn, name="test")
    try:
        await connection.execute("ALTER DOMAIN twiceshy.run_status DROP CONSTRAINT run_status_check")
        await connection.execute("UPDATE twiceshy.run SET status = 'asleep'")
    finally:
        await connection.close()
    for question in (scene.journal.bind(scene.fence), scene.write(scene.intent()), scene.end("done")):
        with pytest.raises(Unreadable, match="asleep"):
            await question


async def test_ten_thousand_steps_do_not_hold_up_the_loop(journal: Journal, scene: Scene) -> None:
    """The index is understood in pieces: others get their turn meanwhile."""
    await scene.step("k1")
    async with journal.connection() as connection:
        columns = (
            "attempt, effect, state, explicit, fingerprint, occurrence, secondary, method, url, exchange, sidecar, "
        )
        columns += "place, wire_key, request_head, request_body, rules"
        await connection.execute(
            f"INSERT INTO twiceshy.step (run_id, key, begun, {columns}) "
            f"SELECT run_id, 'k' || n, n, {columns} FROM twiceshy.step, generate_series(2, 10000) n"
        )
        await connection.execute(
            "INSERT INTO twiceshy.answer SELECT a.run_id, 'k' || i, 0, i, a.exchange, a.attempt, a.status, a.reason, "
            "a.headers, a.body, a.body_id, a.size, a.whole, a.finality, a.own, a.tokens, a.recorded_at "
            "FROM twiceshy.answer a, generate_series(2, 10000) i"
        )
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    rows = await loaded(scene)
    other.cancel()
    assert len(rows.steps) == 10_000
    assert turns > 20
    assert replace(rows.steps[-1].facts, key="k1") == rows.steps[0].facts
