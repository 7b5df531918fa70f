"""The embedded server with real processes: it starts, it stays, and it never outlives who started it."""

import asyncpg


async def test_a_fresh_database_answers(empty_dsn: str) -> None:
    connection = await asyncpg.connect(empty_dsn)
    assert await connection.fetchval("SELECT 1") == 1
    await connection.close()
