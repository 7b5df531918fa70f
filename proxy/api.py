"""The API's process: ``python -m proxy.api --folder FOLDER --port PORT [--host HOST]``, started by the keeper.

Composes ``runtime.api`` with the rules of the proxy. Says on standard error where it listens. The settings' file is
read anew when it has changed: which agents there are.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.settling import assume
from runtime.agents import AgentTable
from runtime.errors import DatabaseAway, TwiceshyError
from runtime.settings import Settings, config_file, load


def agents_of_file(settings: Settings) -> Callable[[], Mapping[str, AgentTable]]:
    """The agents that the settings' file declares at the moment; those of *settings* where there is none."""
    path = config_file()
    known = settings.agents
    stamp = None

    def declared() -> Mapping[str, AgentTable]:
        nonlocal known, stamp
        if path is None:
            return known
        try:
            if (now := path.stat().st_mtime_ns) != stamp:
                known, stamp = load().agents, now
        except (OSError, TwiceshyError) as error:  # it is being edited: what was read before holds
            logging.getLogger("twiceshy.api").warning("%s", error)
        return known

    return declared


async def run(settings: Settings, dsn: str, folder: Path, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    from runtime.api.server import serve, url

    def listening(port: int) -> None:
        print(f"API on {url(host, port)}, its documentation on {url(host, port)}/docs", file=sys.stderr, flush=True)

    await serve(
        settings, dsn, folder, host=host, port=port, agents=agents_of_file(settings),
        assume=assume(settings.route), listening=listening,
    )  # fmt: skip


def main() -> int:
    """Entry point. Exit codes as those of a sidecar: 75 when the database is away, 2 for what a person must mend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(run(load(), os.environ["DATABASE_URL"], given.folder, given.host, given.port))
    except TwiceshyError as error:
        print(error, file=sys.stderr)
        return os.EX_TEMPFAIL if isinstance(error, DatabaseAway) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
