"""``python -m sandbox --port 0 --log FILE``: the sandbox as a process of its own.

Prints ``{"port": N}`` on standard output when it listens. Ends on SIGTERM or SIGINT, and with
``--stdin-lifetime`` when its standard input ends, so that it never outlives who started it.
"""

import argparse
import asyncio
import json
import os
import signal
import ssl
import sys
from pathlib import Path

from sandbox import tls
from sandbox.server import Server
from sandbox.wire import listen


def _arguments() -> argparse.Namespace:
    about = "Stand-in services that count what really happened."
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=about)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="append-only log of all that happens")
    parser.add_argument("--seed", type=int, default=0, help="for what happens by chance (default: %(default)s)")
    parser.add_argument("--stdin-lifetime", action="store_true", help="end when standard input ends")
    about_pass = "pass /NAME/… on to another server on this machine, and count what it does"
    parser.add_argument("--pass-on", action="append", default=[], metavar="NAME=URL", help=about_pass)
    about_tls = "speak TLS; FOLDER gets a CA (ca.pem) and a certificate if it has none"
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help=about_tls)
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="speak TLS with this certificate (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the key of --tls-cert (default: in that file)")
    return parser.parse_args()


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    if arguments.tls_cert is not None:
        return tls.server_context(arguments.tls_cert, arguments.tls_key or arguments.tls_cert)
    if arguments.tls is not None:
        folder = tls.ensure(arguments.tls)
        return tls.server_context(folder / tls.CERTIFICATE, folder / tls.KEY)
    return None


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    passed = dict(each.split("=", 1) for each in arguments.pass_on)
    server = Server(arguments.log, arguments.seed, passed)
    listener = await listen(server.serve, arguments.host, arguments.port, _tls(arguments))
    print(json.dumps({"port": listener.sockets[0].getsockname()[1]}), flush=True)
    if arguments.stdin_lifetime:

        def read() -> None:
            if not os.read(sys.stdin.fileno(), 4096):
                loop.remove_reader(sys.stdin)
                over.set()

        loop.add_reader(sys.stdin, read)
    await over.wait()
    listener.close()  # requests in progress are not waited for: a stand-in may vanish at any time


def main() -> None:
    arguments = _arguments()
    try:
        asyncio.run(_serve(arguments))
    except OSError as error:
        sys.exit(f"sandbox: {error}")


if __name__ == "__main__":
    main()
