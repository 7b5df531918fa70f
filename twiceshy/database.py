"""Work and its record in one transaction, for whichever kind of connection. Nothing is imported: they are told apart by
what they can do.
"""

from collections.abc import Callable
from contextlib import closing
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

#: The one thing that a transaction needs besides the agent's own statements.
RECORD = "SELECT twiceshy.record_step({}, {}, {}, {})"
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


def _blocking(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    try:
        with closing(connection.cursor()) as cursor:
            output = work(cursor, *args)
            cursor.execute(_CURSOR, record(output))
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return output


async def _awaited(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    try:
        async with connection.cursor() as cursor:
            output = await work(cursor, *args)
            await cursor.execute(_CURSOR, record(output))
        await connection.commit()
    except BaseException:
        await connection.rollback()
        raise
    return output


async def _asyncpg(connection: Any, work: Work, args: Args, record: Parameters) -> Any:
    async with connection.transaction():
        output = await work(connection, *args)
        await connection.execute(_ASYNCPG, *record(output))
    return output
