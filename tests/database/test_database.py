"""Connections, migrations, and what an error means."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from runtime import database
from runtime.database import connect, is_bug, is_poison, migrate, sql, through_pooler, to_the_end, where
from runtime.errors import DatabaseAway, UsageError
from runtime.journal import Journal
from tests.conftest import with_database
from tests.database.samples import SETTINGS, Wire, opened

NAMES = sorted(path.stem for path in database.MIGRATIONS.glob("*.sql"))


async def secret(dsn: str) -> bytes:
    connection = await connect(dsn, name="test")
    try:
        found = await connection.fetchval(sql("secret"))
        assert isinstance(found, bytes)
        return found
    finally:
        await connection.close()


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


async def test_what_is_wrong_with_a_dsn_is_told_apart(dsn: str) -> None:
    for bad in (
        with_database(dsn, "no_such_database"),
        "nonsense",
        "postgresql://h:port/x",
        f"{dsn}?statement_cache_size=x",
    ):
        with pytest.raises(UsageError):
            await connect(bad, name="test")
    for away in ("postgresql://u:password@127.0.0.1:1/x",):
        with pytest.raises(DatabaseAway) as told:
            await connect(away, name="test")
        assert "password" not in str(told.value)
        assert "127.0.0.1:1" in str(told.value)


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


async def test_nobody_answering_is_away(dsn: str) -> None:
    async with Wire(dsn) as wire:
        wire.silent = True
        with pytest.raises(DatabaseAway):
            await connect(wire.dsn, name="test", timeout=0.2)
        wire.silent, wire.refusing = False, True
        with pytest.raises(DatabaseAway):
            await connect(wire.dsn, name="test")
        with pytest.raises(DatabaseAway):
            async with opened(wire.dsn):
                pass


def test_a_dsn_for_people_has_no_secrets() -> None:
    assert where("postgresql://user:secret@host:5432/db?password=secret") == "postgresql://host:5432/db"
    assert where("postgresql://host/db") == "postgresql://host/db"
    assert where("postgresql://[::1/db") == "the database"


def test_a_pooler_is_named_in_the_dsn() -> None:
    assert through_pooler("postgresql://h/db?statement_cache_size=0")
    assert not through_pooler("postgresql://h/db?statement_cache_size=100&sslmode=disable")
    assert not through_pooler("postgresql://h/db")
    plain, arguments = database.split("postgresql://h/db?sslmode=disable&statement_cache_size=0")
    assert (plain, arguments) == ("postgresql://h/db?sslmode=disable", {"statement_cache_size": 0})


async def test_the_server_sees_who_is_there(dsn: str) -> None:
    connection = await connect(f"{dsn}?statement_cache_size=0", name="who")
    try:
        assert await connection.fetchval("SELECT current_setting('application_name')") == "twiceshy who"
    finally:
        await connection.close()


def test_an_error_blames_values_the_schema_or_the_database() -> None:
    assert is_poison(asyncpg.CharacterNotInRepertoireError())
    assert is_poison(asyncpg.CheckViolationError())
    assert is_poison(asyncpg.ProgramLimitExceededError())
    assert is_bug(asyncpg.UndefinedTableError())
    for error in (
        OSError(), TimeoutError(), asyncpg.AdminShutdownError(), asyncpg.DiskFullError(), asyncpg.InterfaceError("x"),
        asyncpg.ReadOnlySQLTransactionError(), asyncpg.DeadlockDetectedError(), asyncpg.ConnectionDoesNotExistError(),
    ):  # fmt: skip
        assert not is_poison(error)
        assert not is_bug(error)


async def test_to_the_end_is_cancelled_only_after_it() -> None:
    gate, done = asyncio.Event(), []

    async def work() -> int:
        await gate.wait()
        done.append(True)
        return 7

    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]
    assert await to_the_end(work()) == 7


async def test_a_server_that_may_lose_commits_is_named(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    connection = await connect(dsn, name="test")
    try:
        await connection.execute(
            f"ALTER DATABASE {await connection.fetchval('SELECT current_database()')} SET synchronous_commit = off"
        )
    finally:
        await connection.close()
    async with opened(dsn):
        pass
    assert "synchronous_commit = off" in caplog.text
    assert "twiceshy:" not in caplog.text
