"""The way to Postgres: connections, migrations, named statements, and what an error of it means.

Rules:

* Nothing here or in any statement leans on session state: every connection may be a pooler's. A DSN with
  ``?statement_cache_size=0`` (PgBouncer in transaction mode) also keeps prepared statements out.
* Every statement is named in ``queries.sql`` or stands in a migration; no SQL is put together in Python.
* An error is the row's fault (``is_poison``) or the database's state; the second is waited out.

It does not know what a run or a step is.
"""

import asyncio
import functools
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from runtime.errors import DatabaseAway, UsageError

T = TypeVar("T")
Connection = asyncpg.Connection

CONNECT_TIMEOUT = 10.0
OLDEST = 13  # PostgreSQL: gen_random_uuid() in the core, and the oldest that is still tried
MIGRATIONS = Path(__file__).with_name("migrations")
QUERIES = Path(__file__).with_name("queries.sql")
#: What Postgres or asyncpg raise. ``is_poison`` tells which of them are the row's own fault.
ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
#: SQLSTATE classes that blame the values: data exception, constraint violation, limit exceeded.
_POISON = ("22", "23", "54")


def split(dsn: str) -> tuple[str, dict[str, Any]]:
    """*dsn* without our own parameter, and the arguments for asyncpg that it stood for."""
    try:
        parts = urlsplit(dsn)
    except ValueError as error:
        raise UsageError(f"{where(dsn)}: {error}") from error
    query = parse_qsl(parts.query, keep_blank_values=True)
    size = [value for name, value in query if name == "statement_cache_size"]
    if not size:
        return dsn, {}
    if not size[-1].isdecimal():
        raise UsageError(f"{where(dsn)}: statement_cache_size must be a number, not {size[-1]!r}")
    rest = urlencode([(name, value) for name, value in query if name != "statement_cache_size"])
    return urlunsplit(parts._replace(query=rest)), {"statement_cache_size": int(size[-1])}


def through_pooler(dsn: str) -> bool:
    """Whether statements must be kept unnamed and inside transactions (``?statement_cache_size=0``)."""
    return split(dsn)[1].get("statement_cache_size") == 0


def where(dsn: str) -> str:
    """*dsn* for people: without password and parameters."""
    try:
        parts = urlsplit(dsn)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        return "the database"


async def connect(dsn: str, *, name: str, timeout: float = CONNECT_TIMEOUT) -> Connection:
    """Open a connection that shows itself to the server as ``twiceshy NAME``.

    Raises DatabaseAway when nobody answers, UsageError when the DSN, user or database is wrong.
    """
    plain, arguments = split(dsn)
    try:
        return await asyncpg.connect(
            plain, timeout=timeout, server_settings={"application_name": f"twiceshy {name}"}, **arguments
        )
    except (
        asyncpg.InvalidAuthorizationSpecificationError,
        asyncpg.InvalidCatalogNameError,
        asyncpg.ClientConfigurationError,
        ssl.SSLCertVerificationError,
        ValueError,
    ) as error:
        raise UsageError(f"{where(dsn)}: {error}") from error
    except ERRORS as error:
        raise DatabaseAway(f"{where(dsn)}: {str(error) or type(error).__name__}") from error


class Stateless(asyncpg.Connection):
    """A pooled connection. Nothing here leaves state in a session, so giving it back costs no round trip."""

    __slots__ = ()

    def get_reset_query(self) -> str:
        return ""


def is_poison(error: BaseException) -> bool:
    """True when the values were refused: repeating them is in vain, and others are not concerned."""
    state = getattr(error, "sqlstate", None)
    return isinstance(error, asyncpg.PostgresError) and isinstance(state, str) and state[:2] in _POISON


def heard(done: asyncio.Future[Any]) -> None:
    """Take note of an outcome that nobody waits for."""
    if not done.cancelled():
        done.exception()


def is_bug(error: BaseException) -> bool:
    """True for a statement that does not fit the schema (SQLSTATE class 42): waiting alone mends nothing."""
    return str(getattr(error, "sqlstate", "")).startswith("42")


async def to_the_end(work: Awaitable[T]) -> T:
    """Await *work*, which goes on to its end even when the caller is cancelled; then the caller is."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.add_done_callback(heard)
        raise


@contextmanager
def bounded(connection: Connection, seconds: float) -> Iterator[None]:
    """What is awaited on *connection* fails when it takes longer: the connection, maybe a black hole, is torn down."""
    late = asyncio.get_running_loop().call_later(seconds, connection.terminate)
    try:
        yield
    finally:
        late.cancel()


@asynccontextmanager
async def transaction(connection: Connection) -> AsyncIterator[None]:
    """A transaction whose end cannot be cancelled, and whose locks do not outlive a caller that fell asleep."""
    block = connection.transaction()
    begun = asyncio.ensure_future(block.start())
    try:
        await to_the_end(begun)
        await connection.execute(sql("bounded"))
        yield
    except BaseException:
        if begun.done() and not begun.cancelled() and begun.exception() is None and not connection.is_closed():
            await to_the_end(block.rollback())
        raise
    await to_the_end(block.commit())


# ---- statements


@functools.cache
def _statements() -> dict[str, str]:
    found: dict[str, str] = {}
    pieces = re.split(r"^-- ([a-z_]+): (\S.*)$", QUERIES.read_text("utf-8"), flags=re.MULTILINE)
    for name, body in zip(pieces[1::3], pieces[3::3], strict=True):
        assert name not in found, f"two statements are named {name}"
        found[name] = body.strip().removesuffix(";")
    return found


def sql(name: str) -> str:
    """The statement of ``queries.sql`` that stands under ``-- name: what it is for``."""
    return _statements()[name]


# ---- migrations


async def migrate(dsn: str) -> list[str]:
    """Bring the schema up to date, all or nothing, one caller at a time. Returns the names of those applied.

    The installation's secret is made here once, and never changes: keys on the wire are derived from it.
    """
    connection = await connect(dsn, name="migrate")
    try:
        version = connection.get_server_version()
        if version.major < OLDEST:
            raise UsageError(f"{where(dsn)} is PostgreSQL {version.major}; twiceshy needs {OLDEST} or newer")
        async with transaction(connection):
            return await _migrate(connection, dsn)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError) as error:
        raise UsageError(f"{where(dsn)}: cannot set up the schema: {error}") from error
    except (
        OSError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, asyncpg.InterfaceError,
        asyncpg.InternalClientError,
    ) as error:  # fmt: skip
        raise DatabaseAway(f"{where(dsn)}: {error}") from error
    finally:
        await connection.close()


async def _migrate(connection: Connection, dsn: str) -> list[str]:
    await connection.execute(sql("migration_lock"))
    # Asked first: CREATE SCHEMA IF NOT EXISTS wants the right to create even where the schema stands.
    if not await connection.fetchval(sql("migration_schema_stands")):
        await connection.execute(sql("migration_schema"))
    if not await connection.fetchval(sql("migration_table_stands")):
        await connection.execute(sql("migration_table"))
    known = sorted(path.stem for path in MIGRATIONS.glob("*.sql"))
    done = {row["name"] for row in await connection.fetch(sql("migrations"))}
    if newer := done.difference(known):
        raise UsageError(
            f"{where(dsn)} was migrated by a newer twiceshy ({', '.join(sorted(newer))}): upgrade this one"
        )
    applied = [name for name in known if name not in done]
    for name in applied:
        await connection.execute((MIGRATIONS / f"{name}.sql").read_text("utf-8"))
        await connection.execute(sql("migration_applied"), name)
    await connection.execute(sql("installation"), secrets.token_bytes(32))
    return applied
