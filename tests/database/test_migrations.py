"""Migrations: all or nothing, by one of many; and whoever upgrades step by step, with data, has what others have."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from runtime import database
from runtime.database import Connection, connect, migrate, sql
from runtime.entries import Answer, Recorded
from runtime.errors import DatabaseAway, UsageError
from runtime.journal import Journal
from runtime.step import RunStatus, State
from tests.database.samples import SETTINGS, SIDECAR, Wire, answer, claim, opened, register

NAMES = sorted(path.stem for path in database.MIGRATIONS.glob("*.sql"))
#: All that a migration makes or changes, each thing as the server says it.
SCHEMA = """
    SELECT format('%s %s %s', c.relname, a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull,
                  a.attstorage, pg_get_expr(d.adbin, d.adrelid))) AS thing
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relnamespace = 'twiceshy'::regnamespace AND c.relkind IN ('r', 'c')
    UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'twiceshy'
    UNION ALL SELECT format('%s %s', conname, pg_get_constraintdef(oid)) FROM pg_constraint
    WHERE connamespace = 'twiceshy'::regnamespace
    UNION ALL SELECT format('%s %s', pg_get_functiondef(oid), proacl) FROM pg_proc
    WHERE pronamespace = 'twiceshy'::regnamespace
    UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    ORDER BY 1
"""
#: A run of the first release's tables: one step was answered, one is on its way.
EARLY = f"""
    INSERT INTO twiceshy.sidecar (id, host, folder, pid, address, expires_at)
    VALUES ('{SIDECAR}', 'here', '/state', 1, '127.0.0.1:1', twiceshy.now() + '1 hour');
    INSERT INTO twiceshy.run (id, agent, status, attempt, token_hash, sidecar, lease_expires_at, counter, newest,
                              tokened)
    VALUES ('early', 'refund', 'running', 1, 'old', '{SIDECAR}', twiceshy.now() + '1 hour', 3, 3, true);
    INSERT INTO twiceshy.attempt (run_id, n, token_hash, kind, host, folder, sidecar, counter_at)
    VALUES ('early', 1, 'old', 'launcher', 'here', '/state', '{SIDECAR}', 0);
    INSERT INTO twiceshy.step (run_id, key, begun, attempt, effect, state, explicit, fingerprint, occurrence, secondary,
                               method, url, exchange, sidecar, request_head, request_body, rules)
    SELECT 'early', key, begun, 1, 'at_most_once', state, false, decode(repeat('00', 32), 'hex'), begun,
           decode(repeat('00', 16), 'hex'), 'POST', 'http://api.test/', exchange::uuid, '{SIDECAR}', '{{}}', '', 'rules'
    FROM (VALUES ('paid', 1, 'answered', '00000000-0000-0000-0000-000000000001'),
                 ('mailed', 3, 'sent', '00000000-0000-0000-0000-000000000003')) s (key, begun, state, exchange);
    INSERT INTO twiceshy.answer (run_id, key, n, recorded, attempt, status, reason, headers, body, size, whole,
                                 finality, own)
    VALUES ('early', 'paid', 0, 2, 1, 200, 'OK', '', 'done', 4, true, 'final', false);
"""


@asynccontextmanager
async def asking(dsn: str) -> AsyncIterator[Connection]:
    connection = await connect(dsn, name="test")
    try:
        yield connection
    finally:
        await connection.close()


async def schema(dsn: str) -> list[str]:
    async with asking(dsn) as connection:
        return [row["thing"] for row in await connection.fetch(SCHEMA)]


async def secret(dsn: str) -> bytes:
    async with asking(dsn) as connection:
        found = await connection.fetchval(sql("secret"))
        assert isinstance(found, bytes)
        return found


async def test_migrations_are_applied_once_by_one_of_many(empty_dsn: str) -> None:
    applied = await asyncio.gather(
        *(migrate(empty_dsn) for _ in range(3)), migrate(f"{empty_dsn}?statement_cache_size=0")
    )
    assert sorted(map(len, applied)) == [0, 0, 0, len(NAMES)]
    assert max(applied, key=len) == NAMES
    before = await secret(empty_dsn)
    assert len(before) == 32
    assert await migrate(empty_dsn) == []
    assert await secret(empty_dsn) == before


async def test_a_migration_that_fails_leaves_nothing(
    empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in database.MIGRATIONS.glob("*.sql"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "900_wrong.sql").write_text("CREATE TABLE twiceshy.extra (); SELECT 1 / 0")
    monkeypatch.setattr(database, "MIGRATIONS", tmp_path)
    with pytest.raises(asyncpg.PostgresError):
        await migrate(empty_dsn)
    with pytest.raises(UsageError, match="init-db"):
        await Journal.open(empty_dsn, SETTINGS)
    (tmp_path / "900_wrong.sql").write_text("CREATE TABLE twiceshy.extra ()")
    assert await migrate(empty_dsn) == [*NAMES, "900_wrong"]
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"newer twiceshy \(900_wrong\)"):
        await migrate(empty_dsn)


async def test_a_user_who_may_not_create_is_told(empty_dsn: str) -> None:
    admin = await connect(empty_dsn, name="test")
    try:
        await admin.execute("DROP ROLE IF EXISTS twiceshy_guest")
        await admin.execute("CREATE ROLE twiceshy_guest LOGIN PASSWORD 'guest'")
        parts = urlsplit(empty_dsn)
        host = parts.netloc.rpartition("@")[2]
        guest = urlunsplit(parts._replace(netloc=f"twiceshy_guest:guest@{host}"))
        with pytest.raises(UsageError, match="cannot set up the schema"):
            await migrate(guest)
    finally:
        await admin.execute("DROP ROLE twiceshy_guest")
        await admin.close()


@pytest.mark.parametrize("word", [b"BEGIN", b"migration", b"COMMIT"])
async def test_a_server_that_dies_while_it_is_migrated_is_away(dsn: str, word: bytes) -> None:
    async with Wire(dsn) as wire:
        wire.lose = lambda data: word in data
        with pytest.raises(DatabaseAway, match=r"127\.0\.0\.1"):
            await migrate(wire.dsn)


async def test_a_server_that_dies_before_it_is_migrated_is_away(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = await connect(dsn, name="test")
    connection.terminate()
    monkeypatch.setattr(database, "connect", AsyncMock(return_value=connection))
    with pytest.raises(DatabaseAway):
        await migrate(dsn)
    monkeypatch.undo()
    # asyncpg's own words where the end comes in the middle of a cancelled statement.
    monkeypatch.setattr(database, "_migrate", AsyncMock(side_effect=asyncpg.InternalClientError("cannot switch")))
    with pytest.raises(DatabaseAway, match="cannot switch"):
        await migrate(dsn)


async def test_a_run_goes_on_in_tables_that_were_upgraded_one_step_at_a_time(
    dsn: str, empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MIGRATIONS", tmp_path)
    for name in NAMES:
        shutil.copy(Path(database.__file__).with_name("migrations") / f"{name}.sql", tmp_path)
        assert await migrate(empty_dsn) == [name]
        if name.startswith("002"):
            async with asking(empty_dsn) as connection:
                await connection.execute(EARLY)
    assert await schema(empty_dsn) == await schema(dsn)

    async with opened(empty_dsn) as journal:
        rows = await journal.load("early")
        assert rows is not None
        assert [(step.facts.key, step.state, len(step.answers)) for step in rows.steps] == [
            ("paid", State.ANSWERED, 1),
            ("mailed", State.SENT, 0),
        ]
        await register(journal, "sidecar-2")
        scene = await claim(journal, "early", sidecar="sidecar-2")
        exchange = rows.steps[1].exchange
        assert exchange is not None
        late = Answer("early", "mailed", exchange, 1, answer(), State.ANSWERED)
        assert isinstance(await journal.write(late), Recorded)
        await scene.step("new")
        assert await scene.end("done", 0) is RunStatus.DONE
