"""What is going on when nothing moves: the journal, leases, sessions of the database, the sidecar's tasks."""

import asyncio
import os
import signal
from pathlib import Path

import asyncpg

from sandbox.stage import processes, read

QUERIES = {
    "runs": """
        SELECT id, status, attempt, sidecar, stop_step, lease_expires_at - now() AS lease
        FROM twiceshy.run WHERE status <> 'done' ORDER BY id
    """,
    "attempts": """
        SELECT run_id, n, kind, folder FROM twiceshy.attempt WHERE outcome IS NULL ORDER BY run_id, n
    """,
    "steps": """
        SELECT run_id, key, state, effect, url, exchange, sidecar
        FROM twiceshy.step WHERE state IN ('sent', 'ambiguous') ORDER BY run_id
    """,
    "sidecars": """
        SELECT id, pid, expires_at - now() AS lease, ended_at FROM twiceshy.sidecar ORDER BY started_at DESC LIMIT 5
    """,
    "sessions": """
        SELECT pid, application_name, state, wait_event_type, wait_event, left(query, 100) AS query
        FROM pg_stat_activity WHERE datname = current_database()
    """,
}


async def dump(home: Path) -> list[str]:
    """All of it as lines. What cannot be had says why."""
    lines: list[str] = []
    try:
        connection = await asyncpg.connect(os.environ.get("DATABASE_URL") or _embedded(home), timeout=10)
    except (OSError, asyncpg.PostgresError, ValueError) as error:
        lines.append(f"no database: {error}")
    else:
        for name, query in QUERIES.items():
            lines.append(f"== {name}")
            try:
                lines += ["  " + str(dict(row)) for row in await connection.fetch(query)]
            except asyncpg.PostgresError as error:
                lines.append(f"  {error}")
        await connection.close()
    for pid in processes():
        if b"proxy.sidecar" in read(pid, "cmdline") and str(home).encode() in read(pid, "cmdline"):
            os.kill(pid, signal.SIGUSR1)
    await asyncio.sleep(1)
    for log in sorted(home.glob("**/*.log")):
        lines += [f"== {log}", *log.read_text("utf-8", "replace").splitlines()[-120:]]
    return lines


def _embedded(home: Path) -> str:
    folder = home / "postgres"
    password, port = (folder / "password").read_text().strip(), (folder / "port").read_text().strip()
    return f"postgresql://twiceshy:{password}@127.0.0.1:{port}/twiceshy"
