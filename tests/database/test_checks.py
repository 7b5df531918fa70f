"""What the tables allow is what the pure code knows: words, transitions, the entry type."""

import re
import typing
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from runtime import retry, rows, runs
from runtime.database import connect
from runtime.entries import Conflict, PutBack
from runtime.errors import NotFound, NotNow
from runtime.journal import Journal
from runtime.step import TRANSITIONS, Effect, Event, Finality, Kind, RunStatus, State
from tests.database.samples import DOUBTFUL, PROVISIONAL, Scene, claim


async def domain(dsn: str, name: str) -> set[str]:
    """The words that a domain allows."""
    connection = await connect(dsn, name="test")
    try:
        text = await connection.fetchval(
            "SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c JOIN pg_type t ON t.oid = c.contypid "
            "JOIN pg_namespace n ON n.oid = t.typnamespace WHERE n.nspname = 'twiceshy' AND t.typname = $1",
            name,
        )
    finally:
        await connection.close()
    return set(re.findall(r"'([a-z_]+)'::text", text))


async def test_the_words_of_the_tables_are_those_of_the_code(dsn: str) -> None:
    assert await domain(dsn, "run_status") == set(RunStatus)
    assert await domain(dsn, "step_state") == set(State)
    assert await domain(dsn, "finality") == set(Finality)
    # Passthrough is never journalled.
    assert await domain(dsn, "effect") == set(Effect) - {Effect.PASSTHROUGH}
    outcomes = await domain(dsn, "outcome")
    assert retry.FAILURES < outcomes
    assert outcomes == {"done", "failed", "died", "stopped", "interrupted", "handed_over", "cancelled", "parked"}
    assert await domain(dsn, "step_kind") == set(Kind)
    assert set(runs.TOKENED) < await domain(dsn, "attempt_kind")
    assert set(typing.get_args(runs.How)) == {"assume_done", "send_again"}


async def test_the_entry_type_is_the_row_that_is_sent(dsn: str, scene: Scene) -> None:
    connection = await connect(dsn, name="test")
    try:
        found = await connection.fetch(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'twiceshy.entry'::regclass AND attnum > 0 "
            "ORDER BY attnum"
        )
    finally:
        await connection.close()
    assert [row["attname"] for row in found] == list(rows.ENTRY)
    entries = [scene.intent(), scene.answer(uuid4()), scene.read(), scene.stop(), PutBack("run", "k", uuid4())]
    for entry in entries:
        assert len(rows.entry_row(entry)) == len(rows.ENTRY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("run", "status", "'asleep'"),
        ("run", "status", "'ambiguous'"),  # without a message
        ("run", "stop_message", "'why'"),  # while it runs
        ("run", "id", "'not an id'"),
        ("step", "state", "'maybe'"),
        ("step", "effect", "'passthrough'"),
        ("step", "kind", "'dance'"),
        ("step", "fingerprint", "'\\x00'"),
        ("step", "exchange", "NULL"),
        ("answer", "finality", "'perhaps'"),
        ("answer", "status", "99"),
        ("answer", "size", "-1"),
        ("attempt", "outcome", "'bored'"),
        ("attempt", "kind", "'guest'"),
    ],
)
async def test_the_tables_refuse(dsn: str, scene: Scene, table: str, column: str, value: str) -> None:
    await scene.step()
    connection = await connect(dsn, name="test")
    try:
        with pytest.raises((asyncpg.CheckViolationError, asyncpg.NotNullViolationError)):
            await connection.execute(f"UPDATE twiceshy.{table} SET {column} = {value}")
    finally:
        await connection.close()


# ---- the table of transitions, driven

Way = Callable[[Scene, Any], Awaitable[Any]]


async def _absent(scene: Scene) -> Any:
    return uuid4()


async def _sent(scene: Scene) -> Any:
    return await scene.begin()


async def _answered(scene: Scene) -> Any:
    return await scene.step(facts=PROVISIONAL)


async def _not_sent(scene: Scene) -> Any:
    exchange = await scene.begin()
    await scene.write(PutBack(scene.run_id, "k", exchange))
    return uuid4()


async def _ambiguous(scene: Scene) -> Any:
    exchange = await scene.begin()
    await scene.write(scene.stop(exchange))
    await scene.end("stopped")
    return exchange


STATES: dict[State | None, Callable[[Scene], Awaitable[Any]]] = {
    None: _absent,
    State.SENT: _sent,
    State.ANSWERED: _answered,
    State.NOT_SENT: _not_sent,
    State.AMBIGUOUS: _ambiguous,
}


async def _resolve(scene: Scene, how: str) -> None:
    try:
        await scene.call(runs.resolve, "k", how)
    except (NotNow, NotFound):
        pass


async def _doubt(scene: Scene, exchange: Any) -> None:
    if await scene.state() is State.ANSWERED:
        # A provisional answer is no doubt: the step gets a doubtful one in its place.
        again = await scene.begin(place=0)
        await scene.record(again, DOUBTFUL)
    await scene.end("failed")


EVENTS: dict[Event, Way] = {
    Event.INTENT: lambda scene, _: scene.write(scene.intent()),
    Event.TAKE_OVER: lambda scene, exchange: scene.write(scene.intent(replaces=exchange)),
    Event.ANSWER: lambda scene, exchange: scene.write(scene.answer(exchange)),
    Event.NOTHING_LEFT: lambda scene, exchange: scene.write(PutBack(scene.run_id, "k", exchange)),
    Event.LOST: lambda scene, exchange: scene.write(scene.stop(exchange)),
    Event.READ_RECORDED: lambda scene, _: scene.write(scene.read(key="k", place=1)),
    Event.ASSUME_DONE: lambda scene, _: _resolve(scene, "assume_done"),
    Event.SEND_AGAIN: lambda scene, _: _resolve(scene, "send_again"),
    Event.DOUBTED: _doubt,
}

#: What the same function does under another name: a late answer is an assumption that came true.
ALSO: dict[tuple[State | None, Event], State] = {(State.AMBIGUOUS, Event.ANSWER): State.ANSWERED}
#: Only where the exchange is the last one: driven below, by their own tests.
ELSEWHERE = {(State.NOT_SENT, Event.ASSUME_DONE), (State.ANSWERED, Event.READ_RECORDED), (None, Event.READ_RECORDED)}


@pytest.mark.parametrize("state", list(STATES), ids=str)
async def test_every_event_in_every_state(journal: Journal, state: State | None) -> None:
    for event, way in EVENTS.items():
        if (state, event) in ELSEWHERE:
            continue
        scene = await claim(journal)
        exchange = await STATES[state](scene)
        assert await scene.state() is state
        await way(scene, exchange)
        expected = {**ALSO, **TRANSITIONS}.get((state, event), state)
        assert await scene.state() is expected, f"{state} + {event}"


async def test_reads_are_recorded_in_one_go(scene: Scene) -> None:
    await scene.write(scene.read(PROVISIONAL, key="k"))
    assert await scene.state() is TRANSITIONS[None, Event.READ_RECORDED]
    await scene.write(scene.read(key="k", place=1))
    assert await scene.state() is TRANSITIONS[State.ANSWERED, Event.READ_RECORDED]
    assert await scene.statuses() == [503, 200]


async def test_an_answer_comes_after_it_was_called_not_sent(scene: Scene) -> None:
    exchange = await _ambiguous(scene)
    await scene.call(runs.resolve, "k", "send_again")
    late = await scene.write(scene.answer(exchange))
    assert not isinstance(late, Conflict)
    assert await scene.state() is TRANSITIONS[State.NOT_SENT, Event.ASSUME_DONE]
    assert await scene.statuses() == [200]


def test_every_transition_is_driven() -> None:
    driven = {(state, event) for state in STATES for event in EVENTS}
    assert set(TRANSITIONS) <= driven


async def test_no_body_is_compressed_slowly(dsn: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        found = await connection.fetch(
            "SELECT to_jsonb(a) ->> 'attstorage' AS storage, to_jsonb(a) ->> 'attcompression' AS compression "
            "FROM pg_attribute a WHERE (a.attrelid, a.attname) IN (('twiceshy.step'::regclass, 'request_body'), "
            "('twiceshy.answer'::regclass, 'body'), ('twiceshy.body'::regclass, 'data'))"
        )
    finally:
        await connection.close()
    assert len(found) == 3
    assert all(row["storage"] == "e" or row["compression"] == "l" for row in found), found
