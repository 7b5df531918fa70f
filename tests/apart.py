"""Coroutines for tests and fixtures that are none, and what they ask of the database."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from runtime.database import Connection, connect

T = TypeVar("T")
P = ParamSpec("P")


def apart(work: Coroutine[Any, Any, T]) -> T:
    """Run *work* in a thread of its own: this one may have an event loop, or a plugin may prepare one for it."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


def ask_database(
    dsn: str, verb: Callable[Concatenate[Connection, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
) -> T:
    """*verb* on a connection of its own."""

    async def work() -> T:
        connection = await connect(dsn, name="test")
        try:
            return await verb(connection, *arguments, **named)
        finally:
            await connection.close()

    return apart(work())


def fetch(dsn: str, statement: str, *arguments: Any) -> list[Any]:
    """The rows of *statement*."""

    async def work(connection: Connection) -> list[Any]:
        return list(await connection.fetch(statement, *arguments))

    return ask_database(dsn, work)
