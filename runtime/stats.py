"""What happened, added up, and what replay has saved."""

from dataclasses import dataclass
from datetime import datetime

import asyncpg

from runtime.database import Connection, sql
from runtime.errors import UsageError
from runtime.runs import in_transaction

#: Seconds for one of the counts.
PATIENCE = 10


@dataclass(frozen=True, slots=True)
class Stats:
    """Sums. ``recoveries``: attempts that took up what one before them had left; ``replayed``: answers given again."""

    runs: dict[str, int]
    attempts: int
    recoveries: int
    replayed: int
    joined: int
    llm_calls: int
    tokens: int
    llm_calls_saved: int
    tokens_saved: int


async def read(connection: Connection, since: datetime | None = None) -> Stats:
    """Of all that there is, or of what began *since* then. Raises UsageError where that takes too long to count."""
    try:
        return await _read(connection, since)
    except asyncpg.QueryCanceledError as error:
        raise UsageError(f"there is more than can be counted in {PATIENCE} s: say a later `since`") from error


@in_transaction
async def _read(connection: Connection, since: datetime | None) -> Stats:
    await connection.execute(sql("patient"), f"{PATIENCE}s")
    runs = {row["status"]: row["n"] for row in await connection.fetch(sql("stats_of_runs"), since)}
    attempts = await connection.fetchrow(sql("stats_of_attempts"), since)
    answers = await connection.fetchrow(sql("stats_of_answers"), since)
    assert attempts is not None
    assert answers is not None
    return Stats(
        runs=runs,
        attempts=attempts["attempts"],
        recoveries=attempts["recoveries"],
        replayed=attempts["replayed"],
        joined=attempts["joined"],
        llm_calls=answers["calls"],
        tokens=answers["tokens"],
        llm_calls_saved=attempts["calls_saved"],
        tokens_saved=attempts["tokens_saved"],
    )


def money(tokens: int, price: float | None) -> float | None:
    """What so many tokens cost, about, at a price per million; None: no price is known."""
    return None if price is None else round(tokens * price / 1_000_000, 6)
