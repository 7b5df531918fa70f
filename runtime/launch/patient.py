"""A connection that waits for its database. Shell.

A launcher must not die, nor end its agent, because Postgres is away for a while: time without the database
does not count (DESIGN §5). Every verb of ``runtime.runs`` that the launcher uses may be repeated after a
COMMIT of unknown fate: each is fenced by its token or idempotent.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from runtime import database
from runtime.errors import DatabaseAway

P = ParamSpec("P")
T = TypeVar("T")

PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)


class Patient:
    """One connection, one question at a time, asked again until it is answered."""

    def __init__(self, dsn: Callable[[], str], name: str, say: Callable[[str], None]) -> None:
        self._dsn = dsn  # asked at each connect: an embedded server may come back elsewhere
        self._name = name
        self._say = say
        self._connection: Any = None
        self._turn = asyncio.Lock()

    async def ask(self, verb: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """``verb(connection, *args, **kwargs)``, again and again while the database is away."""
        async with self._turn:
            failures = 0
            while True:
                try:
                    if self._connection is None or self._connection.is_closed():
                        self._connection = await database.connect(self._dsn(), name=self._name)
                    result = await verb(self._connection, *args, **kwargs)
                except (DatabaseAway, *database.ERRORS) as error:
                    if database.is_poison(error) or _our_fault(error):
                        raise
                    await self._drop()
                    if failures == len(PAUSES):
                        self._say(f"the database is away, waiting for it ({error})")
                    await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
                    failures += 1
                else:
                    if failures > len(PAUSES):
                        self._say("the database is back")
                    return result

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            connection.terminate()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            with contextlib.suppress(*database.ERRORS, TimeoutError):
                await connection.close(timeout=2)


def _our_fault(error: BaseException) -> bool:
    """A statement that is wrong (SQLSTATE class 42) will not get better by waiting."""
    state = getattr(error, "sqlstate", None)
    return isinstance(state, str) and state.startswith("42")
