"""``twiceshy env`` and ``twiceshy claim``: a run for programs that this shell starts by itself.

Both leave a *holder* behind: a process of its own that keeps the sidecar running for as long as the shell
that asked for it lives.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
from typing import Any

from proxy import cli, holder
from proxy.kit import lay_out
from runtime import database
from runtime import runs as verbs
from runtime.errors import NotNow
from runtime.keeping import Keeping
from runtime.launch.environment import KEPT, REMOVED, environment, exports
from runtime.settings import load

#: The reserved password of a run that is named without a token: the attempt is the client's process group.
NO_TOKEN = "none"


async def env(arguments: argparse.Namespace) -> int:
    """Print the lines for ``eval``."""
    async with holder.held(load(cli.flags(arguments)), cli.SIDECAR) as keeping:
        conn = await database.connect(keeping.dsn, name="cli")
        try:
            run = await verbs.create(conn, arguments.run)
            row = await verbs.get_run(conn, run)
            _startable(row)
        finally:
            await conn.close()
        print("\n".join(exports(await _given(keeping, run, NO_TOKEN))))
        print(f"twiceshy: run {run}, proxy {keeping.proxy}", file=sys.stderr)
    return 0


async def claim(arguments: argparse.Namespace) -> int:
    """Print a token; on standard error, what the agent's process needs besides."""
    settings = load(cli.flags(arguments))
    async with holder.held(settings, cli.SIDECAR) as keeping:
        conn = await database.connect(keeping.dsn, name="cli")
        try:
            run = await verbs.create(conn, arguments.run)
            claimed = await verbs.claim_silent(
                conn, run, kind="claim", host=socket.gethostname(), folder=str(keeping.folder), lease=settings.lease,
                say=lambda words: print(f"twiceshy: {words}", file=sys.stderr),
            )  # fmt: skip
        finally:
            await conn.close()
        given = await _given(keeping, run, claimed.token, database.split(keeping.dsn)[0])
        if arguments.json:
            told = {"run": run, "attempt": claimed.n, "token": claimed.token, "proxy": keeping.proxy}
            print(json.dumps(told | {"environment": given, "unset": list(REMOVED)}, indent=2))
            return 0
        print(claimed.token)
        # A comment, so that all of it can be given to a shell.
        print(f"# twiceshy: run {run}, attempt {claimed.n}; what the process of its agent needs:", file=sys.stderr)
        print("\n".join(exports(given)), file=sys.stderr)
    return 0


async def _given(keeping: Keeping, run: str, token: str, where: str | None = None) -> dict[str, str]:
    """What a process needs to speak as *run*. *where*: the database's address, for who has a token."""
    kit = await asyncio.to_thread(lay_out, keeping.folder)
    own = {name: os.environ[name] for name in KEPT if name in os.environ}
    return environment(own, run=run, token=token, proxy=keeping.proxy, kit=kit, database=where)


def _startable(row: Any) -> None:
    if row.status.ended or row.status.stopped:
        raise NotNow(f"run {row.id} is {row.status}; twiceshy show {row.id} tells more")
    if row.tokened:
        raise NotNow(
            f"run {row.id} was claimed with a token and takes its current token only: "
            f"twiceshy run --run {row.id} -- COMMAND, or twiceshy claim {row.id}"
        )
