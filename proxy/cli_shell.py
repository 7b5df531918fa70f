"""``twiceshy env`` and ``twiceshy claim``: a run for programs that this shell starts by itself.

Both leave a *holder* behind: a process of its own that keeps the sidecar running for as long as the shell
that asked for it lives.
"""

import argparse
import asyncio
import os
import socket
import sys
from typing import Any

from proxy import cli, holder
from proxy.kit import lay_out
from runtime import database
from runtime import runs as verbs
from runtime.errors import NotNow
from runtime.launch.environment import KEPT, environment, exports, proxy_url
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
        kit = await asyncio.to_thread(lay_out, keeping.folder)
        own = {name: os.environ[name] for name in KEPT if name in os.environ}
        print("\n".join(exports(environment(own, run=run, token=NO_TOKEN, proxy=keeping.proxy, kit=kit))))
        print(f"twiceshy: run {run}, proxy {keeping.proxy}", file=sys.stderr)
    return 0


async def claim(arguments: argparse.Namespace) -> int:
    """Print a token; on standard error, where to use it."""
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
        print(claimed.token)
        print(f"twiceshy: HTTP_PROXY={proxy_url(run, claimed.token, keeping.proxy)}", file=sys.stderr)
    return 0


def _startable(row: Any) -> None:
    if row.status.ended or row.status.stopped:
        raise NotNow(f"run {row.id} is {row.status}; twiceshy show {row.id} tells more")
    if row.tokened:
        raise NotNow(
            f"run {row.id} was claimed with a token and takes its current token only: "
            f"twiceshy run --run {row.id} -- COMMAND, or twiceshy claim {row.id}"
        )
