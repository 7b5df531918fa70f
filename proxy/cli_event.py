"""``twiceshy event``."""

import argparse
import json

from proxy.cli_run import text_or_file
from proxy.cli_runs import connection
from runtime import events
from runtime.settings import load


async def event(arguments: argparse.Namespace) -> int:
    """Send a run an event; print its id."""
    payload = b"null" if arguments.payload is None else text_or_file(arguments.payload)
    limit = load().payload_max
    async with connection() as conn:
        sent = await events.send(conn, arguments.run, arguments.name, payload, arguments.id, limit=limit)
    if arguments.json:
        print(json.dumps({"run": arguments.run, "name": arguments.name, "id": sent.id, "fresh": sent.fresh}))
    else:
        print(f"event {arguments.name} {sent.id}" + ("" if sent.fresh else " was sent before"))
    return 0
