"""Work and its record in one transaction, for whichever kind of connection. Nothing is imported: they are told apart by
what they can do.
"""

from collections.abc import Callable
from contextlib import closing, suppress
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from twiceshy.errors import Fenced

#: The one thing that a transaction needs besides the agent's own statements.
RECORD = "SELECT twiceshy.record_step({}, {}, {}, {})"
#: SQLSTATE (object_not_in_prerequisite_state) with which it refuses an attempt that is not current.
_OVER = "55000"
_CURSOR = RECORD.format("%s", "%s", "%s", "%s")
_ASYNCPG = RECORD.format("$1", "$2", "$3", "$4")


Work: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
#: An output -> what RECORD is given.
Parameters: TypeAlias = Callable[[Any], list[Any]]


def performer(connection: Any) -> Callable[[Any, Work, Args, Parameters], Any]:
    """What does work in a transaction of *connection* that ends with its record."""
    if hasattr(connection, "fetchval"):
        return _asyncpg
    if getattr(connection, "autocommit", False) is True:
        raise ValueError("transaction: the connection commits each statement by itself (autocommit)")
    return _awaited if iscoroutinefunction(connection.commit) else _blocking


def _meaning(error: Exception) -> BaseException:
    """What it means that the record was refused. An attempt that is over has not failed in its step: it ends."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state is None and error.args and isinstance(error.args[0], dict):  # pg8000
        state = error.args[0].get("C")
    return Fenced(f"{error}") if state == _OVER else error


def _blocking(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    try:
        with closing(connection.cursor()) as cursor:
            output = work(cursor, *args)
            try:
                cursor.execute(_CURSOR, record(output))
            except Exception as error:
                raise _meaning(error) from error
        connection.commit()
    except BaseException:
        with suppress(Exception):  # it may be gone
            connection.rollback()
        raise
    return output


async def _awaited(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    try:
        async with connection.cursor() as cursor:
            output = await work(cursor, *args)
            try:
                await cursor.execute(_CURSOR, record(output))
            except Exception as error:
                raise _meaning(error) from error
        await connection.commit()
    except BaseException:
        with suppress(Exception):
            await connection.rollback()
        raise
    return output


async def _asyncpg(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    async with connection.transaction():
        output = await work(connection, *args)
        try:
            await connection.execute(_ASYNCPG, *record(output))
        except Exception as error:
            raise _meaning(error) from error
    return output
