"""Connections, and what an error means."""

import asyncio

import asyncpg
import pytest

from runtime import database
from runtime.database import connect, is_bug, is_poison, through_pooler, to_the_end, where
from runtime.errors import DatabaseAway, UsageError
from tests.conftest import with_database
from tests.database.samples import Wire, opened


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
