"""``twiceshy show``, ``runs``, ``resolve``, ``init-db``: what needs the database only."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from proxy import cli
from proxy.cli_run import text_or_file
from proxy.settling import assume
from runtime import attributes, database, listing, tape
from runtime import runs as verbs
from runtime.errors import DatabaseAway, NotFound, UsageError
from runtime.settings import load
from runtime.settling import Given, settle
from runtime.step import RunStatus, State
from runtime.summary import needs_a_person, summary
from runtime.tapes import read_tape

#: How much of a result is shown, in characters.
SHOWN = 2000


@asynccontextmanager
async def connection() -> AsyncIterator[Any]:
    """A connection to DATABASE_URL or to the embedded database, which is started if need be."""
    from runtime.keeping import Keeping

    dsn = os.environ.get("DATABASE_URL")
    keeping = None if dsn else await Keeping.open(load(), cli.SIDECAR)
    try:
        opened = await database.connect(dsn or (keeping.dsn if keeping else ""), name="cli")
        try:
            yield opened
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError) as error:
            raise UsageError(f"the tables are not there or are old ({error}): run twiceshy init-db") from error
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
            raise DatabaseAway(f"{type(error).__name__}: {error}") from error
        finally:
            await opened.close(timeout=5)
    finally:
        if keeping is not None:
            await keeping.close()


async def show(arguments: argparse.Namespace) -> int:
    """Print the tape."""
    async with connection() as conn:
        read = await read_tape(conn, arguments.run)
        row = await verbs.get_run(conn, arguments.run)
    if arguments.json:
        more = {"input": _value(row.input), "result": _value(row.result), "attributes": row.attributes}
        print(json.dumps(tape.as_json(read) | more, indent=2))
        return 0
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(tape.picture(read, width=shutil.get_terminal_size((110, 40)).columns, colour=colour))
    print()
    print("\n".join(summary(read)[1:] or summary(read)[:1]))
    if row.result is not None:
        print(f"result: {_short(row.result)}")
    return 0


def _value(text: bytes | None) -> Any:
    """What the database holds as JSON. What is none after all is shown as a text."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return (text or b"").decode("utf-8", "replace")


def _short(text: bytes) -> str:
    """On one line, and nothing that moves a cursor."""
    shown = json.dumps(_value(text))
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}… ({len(text):,} bytes; --json shows them)"


async def runs(arguments: argparse.Namespace) -> int:
    """List runs."""
    if arguments.status is not None and arguments.status not in list(RunStatus):
        raise UsageError(f"--status {arguments.status}: one of {', '.join(RunStatus)}")
    if not 0 < arguments.limit < 1 << 31:
        raise UsageError(f"--limit {arguments.limit}: a number from 1")
    status = RunStatus(arguments.status) if arguments.status else None
    filters = listing.Filters(status, arguments.agent, [attributes.read(each) for each in arguments.attribute])
    async with connection() as conn:
        rows = (await listing.page(conn, filters, limit=arguments.limit)).runs
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return 0
    if not rows:
        of = f" of agent {arguments.agent}" if arguments.agent else ""
        print(f"no runs{of}" if status is None else f"no runs{of} that are {status}")
        return 0
    lines = [("RUN", "STATUS", "ATTEMPTS", "AGE", "AGENT", "")]
    for row in rows:
        note = row.stop_message or row.error or ""
        lines.append((row.id, row.status, str(row.attempt), _age(row.created_at), row.agent, note))
    run, status_, attempts, age, agent = (max(len(line[n]) for line in lines) for n in range(5))
    # A reason of some hundred characters would fold the table.
    wide = shutil.get_terminal_size((110, 40)).columns if sys.stdout.isatty() else None
    room = None if wide is None else max(20, wide - run - status_ - attempts - age - agent - 10)
    for line in lines:
        note = line[5] if room is None or len(line[5]) <= room else f"{line[5][: room - 1]}…"
        print(f"{line[0]:<{run}}  {line[1]:<{status_}}  {line[2]:>{attempts}}  {line[3]:>{age}}  {line[4]:<{agent}}  "
              f"{note}".rstrip())  # fmt: skip
    return 0


def _age(since: datetime) -> str:
    seconds = max(0.0, (datetime.now(UTC) - since).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _as_json(row: Any) -> dict[str, Any]:
    return {
        "run": row.id,
        "agent": row.agent,
        "status": str(row.status),
        "attempts": row.attempt,
        "for_workers": row.for_workers,
        "priority": row.priority,
        "created_at": row.created_at.isoformat(),
        "ended_at": row.ended_at.isoformat() if row.ended_at else None,
        "stop": {"step": row.stop_step, "message": row.stop_message} if row.status.stopped else None,
        "error": row.error,
        "attributes": row.attributes,
    }


async def resolve(arguments: argparse.Namespace) -> int:
    """Say what happened to a step whose outcome is not known."""
    how = arguments.how
    if not arguments.step:
        raise UsageError(f"no step is named; twiceshy show {arguments.run} lists what is open")
    headers = tuple(_header(text) for text in arguments.header)
    if how == "send_again" and (headers or arguments.body is not None or arguments.status is not None):
        raise UsageError("--status, --header and --body are the answer of assume_done; send_again gets a real one")
    if arguments.status is not None and not 200 <= arguments.status <= 599:
        raise UsageError(f"--status {arguments.status}: no status that ends a request")
    body = None if arguments.body is None else text_or_file(arguments.body)
    given = Given(arguments.status, headers, body)
    async with connection() as conn:
        key = await _step(conn, arguments.run, arguments.step)
        status = await settle(conn, arguments.run, key, how, given, assume(load().route))
        read = await read_tape(conn, arguments.run)
        for_workers = (await verbs.get_run(conn, arguments.run)).for_workers
    if arguments.json:
        print(json.dumps({"run": arguments.run, "step": key, "how": how, "status": status}))
        return 0
    print(f"step {key}: {how}; run {arguments.run} is {status}")
    if status.stopped:
        print("\n".join(needs_a_person(read)))
    else:
        print("a worker goes on with it" if for_workers else f"to go on: twiceshy run --run {arguments.run} -- COMMAND")
    return 0


async def _step(conn: Any, run: str, given: str) -> str:
    """The key that *given* stands for: itself, the one with that number in ``show``, or the only open one like it."""
    steps = await verbs.steps(conn, run)
    if any(step.key == given for step in steps):
        return given
    # The shortest of keys is longer than any number of a step.
    if given.isdecimal() and len(given) < 8 and 0 < int(given) <= len(steps):
        return steps[int(given) - 1].key
    open_ = [step.key for step in steps if step.state is State.AMBIGUOUS and step.key.startswith(given)]
    if len(open_) == 1:
        return open_[0]
    if open_:
        raise UsageError(f"run {run} has {len(open_)} open steps that begin with {given!r}: {', '.join(open_)}")
    raise NotFound(f"run {run} has no step {given!r}; twiceshy show {run} lists what is open")


def _header(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise UsageError(f"--header {text!r}: NAME:VALUE")
    return name.strip().encode("latin-1", "replace"), value.strip().encode("utf-8")


async def init_db(_arguments: argparse.Namespace) -> int:
    """Apply the migrations that are missing."""
    from runtime.keeping import Keeping

    dsn = os.environ.get("DATABASE_URL")
    if not dsn:
        async with await Keeping.open(load(), cli.SIDECAR) as keeping:  # migrates before it is open
            print(f"the embedded database in {keeping.folder} is up to date")
        return 0
    applied = await database.migrate(dsn)
    print("\n".join(f"applied {name}" for name in applied) or "up to date")
    return 0
