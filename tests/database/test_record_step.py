"""``twiceshy.record_step``: a step and what the agent's own transaction wrote stand together, or neither does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import pytest

from runtime import runs
from runtime.database import connect
from runtime.entries import Bound, Conflict, Fence, Own, Recorded
from runtime.journal import Journal
from runtime.step import Effect, Kind, RunStatus, State
from tests.database.samples import SIDECAR, Scene, claim


class Told(Scene):
    """An attempt that knows its token."""

    token: str

    async def by_sql(self, connection: Any, output: str | None = "1", key: str = "k", token: str | None = None) -> None:
        await connection.execute(
            "SELECT twiceshy.record_step($1, $2, $3, $4)", self.run_id, token or self.token, key, output
        )

    async def local(self, key: str = "k", replaces: UUID | None = None) -> UUID:
        return await self.begin(key, Effect.REPEATABLE, own=Own(Kind.LOCAL, "refund"), replaces=replaces)


async def told(journal: Journal, run_id: str | None = None) -> Told:
    async with journal.connection() as connection:
        run_id = await runs.create(connection, run_id)
        claimed = await runs.claim(
            connection, run_id, kind="launcher", host="here", folder="/state", lease=30.0, proved_dead=True
        )
    made = Told(journal, run_id, Fence(run_id, runs.hash_token(claimed.token), SIDECAR), claimed.n)
    made.token = claimed.token
    return made


@asynccontextmanager
async def own(dsn: str, user: str | None = None) -> AsyncIterator[Any]:
    """An agent's own connection."""
    parts = urlsplit(dsn)
    if user is not None:
        parts = parts._replace(netloc=f"{user}:secret@{parts.netloc.rpartition('@')[2]}")
    connection = await connect(urlunsplit(parts), name="agent")
    try:
        yield connection
    finally:
        connection.terminate()


async def test_all_of_the_transaction_or_nothing(dsn: str, journal: Journal) -> None:
    scene = await told(journal)
    exchange = await scene.local()
    output = ' {"n": 1e400, "n": "\\u0000\\ud800"} '
    async with own(dsn) as connection:
        await connection.execute("CREATE TABLE refund (id int PRIMARY KEY)")
        for end, expected in (("ROLLBACK", (0, State.SENT)), ("COMMIT", (1, State.ANSWERED))):
            await connection.execute("BEGIN; INSERT INTO refund VALUES (1)")
            await scene.by_sql(connection, output)
            await connection.execute(end)
            assert (await connection.fetchval("SELECT count(*) FROM refund"), await scene.state()) == expected
        with pytest.raises(asyncpg.UniqueViolationError, match=f"step k of run {scene.run_id} is recorded already"):
            await scene.by_sql(connection, output)
    assert await scene.write(scene.answer(exchange)) == Conflict()  # what is handed in besides comes second
    rows = await journal.load(scene.run_id)
    assert rows is not None
    ((answer,),) = [step.answers for step in rows.steps]
    assert answer.facts.body == b'{"output": ' + output.encode() + b"}"
    assert (answer.n, answer.recorded, answer.attempt) == (0, 2, scene.n)
    await scene.local("next")


async def test_only_an_open_local_step_of_the_current_attempt(dsn: str, journal: Journal) -> None:
    scene = await told(journal)
    await scene.begin("http")
    first = await scene.local()
    refusals = [
        ({"key": "http"}, "has no local step http"),
        ({"key": "nothing"}, "has no local step nothing"),
        ({"token": "another"}, "the token is not that"),
        ({"output": "{"}, "its output is not JSON"),
        ({"output": "NaN"}, "its output is not JSON"),
        ({"output": "[" * 201 + "]" * 201}, "nested more than 200 deep"),
        ({"output": '"' + "x" * (1 << 20) + '"'}, r"more than twiceshy.payload_max \(1048576\)"),
    ]
    async with own(dsn) as connection:
        for given, words in refusals:
            with pytest.raises(asyncpg.PostgresError, match=words) as refused:
                await scene.by_sql(connection, **given)
            assert scene.run_id in str(refused.value)
            assert refused.value.hint
        later = await told(journal, scene.run_id)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="the token is not that"):
            await scene.by_sql(connection)
        await later.local(replaces=first)
        await connection.execute("SET twiceshy.payload_max = 2000000")
        await later.by_sql(connection, "[" * 200 + '"' + "[{" * (1 << 19) + '\\""' + "]" * 200)
        await later.local("other")
        async with journal.connection() as theirs:
            from runtime import verbs

            await verbs.cancel(theirs, scene.run_id)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="the run is cancelled"):
            await later.by_sql(connection, key="other")


async def test_a_role_that_may_do_nothing_else(dsn: str, journal: Journal) -> None:
    scene = await told(journal)
    await scene.local()
    role = f"agent_{scene.run_id}"
    async with own(dsn) as owner:
        await owner.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
        try:
            async with own(dsn, role) as agent:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await scene.by_sql(agent)
                await owner.execute(f"GRANT USAGE ON SCHEMA twiceshy TO {role}")
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await scene.by_sql(agent)
                await owner.execute(f"GRANT EXECUTE ON FUNCTION twiceshy.record_step TO {role}")
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await agent.fetch("SELECT * FROM twiceshy.run")
                # Names of its own do not lead the function astray.
                await agent.execute("CREATE TEMP TABLE pg_settings (name text, setting text)")
                await agent.execute("CREATE FUNCTION pg_temp.sha256(bytea) RETURNS bytea LANGUAGE sql AS 'SELECT $1'")
                await agent.execute("SET search_path = pg_temp, pg_catalog; SET standard_conforming_strings = off")
                await scene.by_sql(agent, None)
        finally:
            await owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert await scene.state() is State.ANSWERED


async def test_a_claim_waits_for_the_transaction(dsn: str, journal: Journal) -> None:
    for end, expected in (("ROLLBACK", State.SENT), ("COMMIT", State.ANSWERED)):
        scene = await told(journal)
        await scene.local()
        async with own(dsn) as connection:
            await connection.execute("BEGIN")
            await scene.by_sql(connection)
            later = asyncio.create_task(scene.again())
            done, _ = await asyncio.wait({later}, timeout=0.1)
            assert not done
            await connection.execute(end)
            await later
        assert await scene.state() is expected


async def test_a_transaction_that_is_kept_open_holds_up_its_own_run_alone(dsn: str, journal: Journal) -> None:
    scenes = [await told(journal) for _ in range(3)]
    slow = scenes[1]
    await slow.local()
    for scene in scenes:
        assert isinstance(await journal.bind(scene.fence), Bound)
    async with own(dsn) as connection:
        await connection.execute("BEGIN")
        await slow.by_sql(connection)
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"
        began = time.monotonic()
        found = await journal.renew([scene.fence for scene in scenes], extend=True)
        assert all(isinstance(outcome, Bound) for outcome in found.values())
        assert await slow.call(runs.renew, slow.fence.token_hash, 30.0) is RunStatus.RUNNING
        await scenes[0].begin()
        assert time.monotonic() - began < 5
        # Who has set less has less.
        await connection.execute("ROLLBACK; SET idle_in_transaction_session_timeout = '3s'; BEGIN")
        await slow.by_sql(connection)
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "3s"


async def test_tries_are_counted_by_their_exchanges(journal: Journal) -> None:
    scene = await claim(journal)
    local = Own(Kind.LOCAL, "work")
    exchange = await scene.begin("k", Effect.REPEATABLE, own=local)
    http = await scene.begin("h", Effect.REPEATABLE)
    for n in range(1, 4):
        rows = await journal.load(scene.run_id)
        assert rows is not None
        assert [step.tries for step in rows.steps] == [n, 1]
        exchange = await scene.begin("k", Effect.REPEATABLE, own=local, replaces=exchange)
        http = await scene.begin("h", Effect.REPEATABLE, replaces=http)
    assert isinstance(await scene.record(exchange), Recorded)
