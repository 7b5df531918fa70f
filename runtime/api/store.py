"""The API's way to the database: a small pool, waits that are bounded, and errors that say what they mean.

Every statement is sent inside a transaction: the connection may be a pooler's.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from runtime import database
from runtime.api.problems import Problem
from runtime.database import Connection
from runtime.errors import DatabaseAway, UsageError
from runtime.settings import Settings

#: Connections of an API process. Nothing that waits for long holds one.
POOL = 8


class Store:
    """Make it with ``open``."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]", dsn: str, wait: float) -> None:
        self._pool = pool
        self._dsn = dsn
        self._wait = wait

    @classmethod
    async def open(cls, dsn: str, settings: Settings) -> "Store":
        """Connects when it is first needed."""
        plain, arguments = database.split(dsn)
        pool = await asyncpg.create_pool(
            plain,
            min_size=0,
            max_size=POOL,
            connection_class=database.Stateless,
            timeout=min(database.CONNECT_TIMEOUT, settings.database_wait),
            command_timeout=settings.database_wait,
            server_settings={"application_name": "twiceshy api"},
            **arguments,
        )
        return cls(pool, dsn, settings.database_wait)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One, for a few statements. Raises DatabaseAway, and Problem for values that the database refuses."""
        try:
            opened = await self._pool.acquire(timeout=self._wait)
        except (TimeoutError, *database.ERRORS) as error:
            raise self._away(error) from error
        try:
            yield opened  # type: ignore[misc]
        except asyncpg.PostgresError as error:
            if database.is_poison(error):
                raise Problem(422, f"the database refuses a value: {error}") from error
            if database.is_bug(error):
                raise UsageError(f"the tables are not there or are old ({error}): run twiceshy init-db") from error
            raise self._away(error) from error
        except (TimeoutError, OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise self._away(error) from error
        finally:
            await database.to_the_end(self._release(opened))

    async def close(self) -> None:
        """Disconnect."""
        self._pool.terminate()

    async def _release(self, connection: Any) -> None:
        try:
            await self._pool.release(connection, timeout=5.0)
        except (TimeoutError, *database.ERRORS):
            pass  # it is closed, and another will be opened

    def _away(self, error: BaseException) -> DatabaseAway:
        return DatabaseAway(f"{database.where(self._dsn)}: {str(error) or type(error).__name__}")
