"""A step and the agent's own rows, committed together: with asyncpg on a real database, and as DB-API has it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

import twiceshy
from tests.library.scripted import Script, ok, permit
from tests.stack import Attempt, Stack
from twiceshy import aio, steps

Begin = Callable[..., Attempt]


@pytest.fixture
async def connection(one_stack: Stack, run: str) -> AsyncIterator[Any]:
    made = await asyncpg.connect(one_stack.dsn)
    await made.execute("CREATE TABLE IF NOT EXISTS booking (run text, cents int CHECK (cents < 1000))")
    yield made
    await made.close()


async def book(connection: Any, run: str, cents: int) -> Any:
    await connection.execute("INSERT INTO booking VALUES ($1, $2)", run, cents)
    return {"cents": cents}


async def booked(connection: Any, run: str) -> list[int]:
    return [row["cents"] for row in await connection.fetch("SELECT cents FROM booking WHERE run = $1", run)]


async def test_rows_and_step_are_there_once(begin: Begin, run: str, connection: Any) -> None:
    for _ in range(3):
        await asyncio.to_thread(begin)
        assert await aio.transaction("book", connection, book, run, 5) == {"cents": 5}
        assert await aio.transaction("book", connection, book, run, 6) == {"cents": 6}
    assert await booked(connection, run) == [5, 6]


async def test_what_dies_before_the_commit_has_done_neither(begin: Begin, run: str, connection: Any) -> None:
    async def dies(connection: Any, run: str, cents: int) -> Any:
        await book(connection, run, cents)
        raise KeyboardInterrupt

    await asyncio.to_thread(begin)
    with pytest.raises(KeyboardInterrupt):
        await aio.transaction("book", connection, dies, run, 5)
    await asyncio.to_thread(begin)
    assert await aio.transaction("book", connection, book, run, 5) == {"cents": 5}
    assert await booked(connection, run) == [5]


async def test_a_transaction_that_fails_has_failed(begin: Begin, run: str, connection: Any) -> None:
    for _ in range(2):
        await asyncio.to_thread(begin)
        with pytest.raises(twiceshy.StepFailed, match="CheckViolationError"):
            await aio.transaction("book", connection, book, run, 1000)
    assert await booked(connection, run) == []


async def test_a_commit_of_which_nothing_was_heard_counts(begin: Begin, run: str, connection: Any) -> None:
    class Cut:
        """Its commits work, and are not heard of."""

        def __init__(self) -> None:
            self.fetchval = connection.fetchval
            self.execute = connection.execute

        def transaction(self) -> Any:
            return self

        async def __aenter__(self) -> None:
            self.inner = connection.transaction()
            await self.inner.start()

        async def __aexit__(self, *_: object) -> None:
            await self.inner.commit()
            raise ConnectionResetError("gone")

    await asyncio.to_thread(begin)
    assert await aio.transaction("book", Cut(), book, run, 5) == {"cents": 5}
    assert await booked(connection, run) == [5]


async def test_who_was_fenced_commits_nothing(begin: Begin, run: str, connection: Any, one_stack: Stack) -> None:
    await asyncio.to_thread(begin)

    async def slow(connection: Any, run: str, cents: int) -> Any:
        await book(connection, run, cents)
        await asyncio.to_thread(one_stack.claim, run)

    with pytest.raises(twiceshy.Fenced):
        await aio.transaction("book", connection, slow, run, 5)
    assert await booked(connection, run) == []
    await asyncio.to_thread(begin)
    assert await aio.transaction("book", connection, book, run, 5) == {"cents": 5}


# ---- DB-API


class Database:
    """A connection, and its cursor, of DB-API: writes down what is done."""

    autocommit: Any = False

    def __init__(self) -> None:
        self.done: list[Any] = []

    def cursor(self) -> "Database":
        return self

    def execute(self, statement: str, parameters: Any = ()) -> None:
        self.done.append((statement, tuple(parameters)))
        if "fails" in statement:
            raise ValueError(statement)

    def commit(self) -> None:
        self.done.append("commit")

    def rollback(self) -> None:
        self.done.append("rollback")

    def close(self) -> None:
        pass


def test_the_record_is_the_last_statement_before_the_commit() -> None:
    def work(cursor: Any, cents: int) -> tuple[int]:
        cursor.execute("INSERT", [cents])
        return (cents,)

    database = Database()
    script = Script(permit(run="r", token="t"))
    assert script.play(steps.transaction("book", database, work, 5)) == [5]
    record = ("SELECT twiceshy.record_step(%s, %s, %s, %s)", ("r", "t", "k#0", "[5]"))
    assert database.done == [("INSERT", (5,)), record, "commit"]
    assert script.asked == [("POST", "/steps", {"name": "book", "input": [5], "transaction": True})]


def test_what_fails_is_rolled_back_and_handed_in() -> None:
    database = Database()
    script = Script(permit(run="r", token="t"), ok({"error": {"type": "ValueError", "message": "fails"}}))
    with pytest.raises(twiceshy.StepFailed, match="ValueError: fails"):
        script.play(steps.transaction("book", database, lambda cursor: cursor.execute("fails")))
    assert database.done == [("fails", ()), "rollback"]
    assert script.asked[1] == ("PUT", "/steps/k%230", {"error": {"type": "ValueError", "message": "fails"}})


def test_a_connection_that_commits_each_statement_is_refused() -> None:
    database = Database()
    database.autocommit = True
    with pytest.raises(ValueError, match="autocommit"):
        Script().play(steps.transaction("book", database, int))
