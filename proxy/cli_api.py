"""``twiceshy api``: an API in the foreground, and how to reach the one that runs."""

import argparse
import json
import os
import shlex
import socket
import sys
from urllib.parse import urlsplit

from proxy import api as process
from proxy import cli
from runtime import database
from runtime.api import keys
from runtime.errors import UsageError
from runtime.folder import make_folder, state_folder
from runtime.settings import load

PORT = 7778


async def api(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from runtime.keeping import Keeping

    if arguments.show:
        return _show(as_json=arguments.json)
    if not arguments.host:
        raise UsageError("--host is empty, which would be every address of this machine: say 0.0.0.0 if you mean that")
    if not 0 <= arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}: a number from 0 (a free one) to 65535")
    settings = load(cli.flags(arguments))
    dsn = os.environ.get("DATABASE_URL")
    if dsn:
        folder = state_folder(dsn)
        make_folder(folder)
        await database.migrate(dsn)
        await process.run(settings, dsn, folder, arguments.host, arguments.port)
        return 0
    async with await Keeping.open(settings, cli.SIDECAR) as keeping:
        await process.run(settings, keeping.dsn, keeping.folder, arguments.host, arguments.port)
    return 0


def _show(*, as_json: bool) -> int:
    folder = state_folder(os.environ.get("DATABASE_URL") or None)
    address, key = keys.read(keys.address_file(folder)), keys.read(keys.key_file(folder))
    if address is not None and not _listens(address):
        address = None
    if as_json:
        print(json.dumps({"address": address, "key": key}))
    else:
        given = {"TWICESHY_API": address, "TWICESHY_API_KEY": key}
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in given.items() if value is not None))
    if address is None:
        print(f"twiceshy: no API of {folder} is running: twiceshy up, twiceshy worker or twiceshy api", file=sys.stderr)
        return 1
    return 0


def _listens(address: str) -> bool:
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), 2.0):
            return True
    except OSError:
        return False
