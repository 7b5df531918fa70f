"""The sidecar process: ``python -m proxy.sidecar --folder FOLDER --port PORT [--host HOST]``.

One asyncio process: the door, the handler, the journal's writer, a heartbeat. Prints one JSON line when it
listens, ``{"id": …, "port": …}``; everything else goes to standard error. SIGTERM drains.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from aiohttp import web

from proxy.admission import Admission
from proxy.attempts import Attempts
from proxy.authority import Authority
from proxy.blind import Blind, is_blind
from proxy.doors import Door, House, listen
from proxy.handler import Handler
from proxy.parking import Parking
from proxy.profiles import Rules
from proxy.pulse import Pulse
from proxy.recorder import Shell
from proxy.tokenless import Tokenless
from proxy.tunnels import Tunnels
from proxy.upstream import Upstream
from proxy.wakes import Wakes
from runtime import failpoints
from runtime.errors import DatabaseAway, TwiceshyError, UsageError
from runtime.journal import Journal
from runtime.settings import Settings, load

log = logging.getLogger("twiceshy.sidecar")


async def serve(settings: Settings, dsn: str, folder: Path, state: Path, host: str, port: int) -> None:
    """Run until SIGTERM or SIGINT. Raises UsageError when the port is taken, DatabaseAway without database."""
    rules = Rules.load(settings.route)
    identity = f"s{secrets.token_hex(8)}"
    journal = await Journal.open(dsn, settings)
    doors: set[Door] = set()
    attempts = Attempts(journal, settings, identity)

    async def renew() -> bool:
        alive = await journal.heartbeat(identity, settings.lease)
        await attempts.renew()
        return alive

    pulse = Pulse(settings.lease, renew)
    handler: Handler | None = None
    blind: Blind | None = None
    ready = asyncio.Event()

    async def dispatch(request: web.BaseRequest) -> web.StreamResponse:
        await ready.wait()  # agents know the port of the one before, and ask as soon as it listens
        assert handler is not None
        return await handler(request)

    async def pass_through(door: Door) -> None:
        await ready.wait()
        assert blind is not None
        await blind(door)

    server = web.Server(dispatch)
    tunnels = Tunnels(Authority(state), attempts.note, partial(is_blind, rules), pass_through)
    try:
        listener = await listen(House(server, doors, settings.lease, tunnels), host, port)
    except OSError as error:
        await journal.close()
        raise UsageError(f"the proxy cannot listen on {host}:{port}: {error.strerror or error}") from error
    port = listener.sockets[0].getsockname()[1]
    secret = await journal.register(
        sidecar=identity, host=socket.gethostname(), folder=str(folder), pid=os.getpid(),
        address=f"{host}:{port}", lease=settings.lease,
    )  # fmt: skip
    # The installation's name, not the process's: what goes again after a restart goes as it went first.
    installation = hashlib.blake2b(secret, digest_size=6, person=b"via").hexdigest()
    upstream = Upstream(settings, via=f"twiceshy-{installation}", own_ports=frozenset({port, *_of_the_api(state)}))
    tokenless = Tokenless(attempts, journal, identity, str(folder), settings.lease)
    wakes = Wakes(journal, settings.poll)
    shell = Shell(journal, upstream, settings, pulse, wakes)
    admission = Admission(attempts, tokenless, settings)
    handler = Handler(shell, attempts, admission, rules, secret)
    blind = Blind(admission, attempts, upstream, settings)
    ready.set()

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGUSR1, _tell_tasks)
    parking = asyncio.create_task(Parking(attempts, journal, settings).watch())
    beating = asyncio.create_task(_beat(attempts, upstream, doors, pulse, settings.lease))
    print(json.dumps({"id": identity, "port": port}), flush=True)
    await stopping.wait()

    listener.close()
    await _drain(attempts, settings.drain)
    for task in (parking, beating):
        task.cancel()
    await asyncio.gather(parking, beating, return_exceptions=True)
    await tunnels.close()
    for door in list(doors):
        door.abort()
    for exchange in attempts.exchanges():
        await exchange.stop()
    await handler.close()
    await wakes.close()
    await upstream.close()
    with contextlib.suppress(DatabaseAway):
        await journal.retire(identity)
    await journal.close()


def _of_the_api(state: Path) -> list[int]:
    """The port that the keeper has for the API, which it chose before it started us."""
    with contextlib.suppress(OSError, ValueError):
        return [int((state / "api" / "port").read_text("ascii"))]
    return []


def _tell_tasks() -> None:
    """SIGUSR1: say on standard error what every task waits for."""
    for task in asyncio.all_tasks():
        task.print_stack(limit=8, file=sys.stderr)


async def _beat(attempts: Attempts, upstream: Upstream, doors: set[Door], pulse: Pulse, lease: float) -> None:
    while True:
        await asyncio.sleep(lease / 3)
        for door in [door for door in doors if not door.answers()]:
            door.abort()
        try:
            await pulse.beat()
            await attempts.tend()
            await upstream.forget(idle=max(60.0, lease))
        except DatabaseAway as error:
            log.warning("heartbeat: %s", error)
        except Exception:
            log.exception("heartbeat")


async def _drain(attempts: Attempts, limit: float) -> None:
    """Wait for what is on its way, at most *limit* seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limit
    while any(exchange.inner is None for exchange in attempts.exchanges()) and loop.time() < until:
        await asyncio.sleep(0.02)


def main() -> int:
    """Entry point. Exit code 2 for what the person who started it can mend, 75 for a database that is away."""
    parser = argparse.ArgumentParser(prog="python -m proxy.sidecar")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="where the CA is (default: FOLDER)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    dsn = os.environ.get("DATABASE_URL")
    try:
        failpoints.arm()
        if not dsn:
            raise UsageError("DATABASE_URL is not set: `twiceshy up` starts a sidecar with a Postgres of its own")
        state = arguments.state or arguments.folder
        asyncio.run(serve(load(), dsn, arguments.folder, state, arguments.host, arguments.port))
    except TwiceshyError as error:
        print(f"twiceshy sidecar: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else os.EX_TEMPFAIL if isinstance(error, DatabaseAway) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
