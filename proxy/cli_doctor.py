"""``twiceshy doctor``: run a command once and say what of it went past the sidecar."""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

from proxy import cli
from proxy.kit import lay_out
from runtime.errors import UsageError
from runtime.launch.diagnosis import as_json, lines
from runtime.launch.sightings import Allowed, allowed
from runtime.settings import load

WELL, NOT_WELL = 0, 1


async def doctor(arguments: argparse.Namespace) -> int:
    """The command's streams are its own; ours is standard error. With ``--json`` standard output is ours, too."""
    from runtime.keeping import Keeping
    from runtime.launch import launcher
    from runtime.launch.agent import ignored_signals
    from runtime.launch.attempt import check
    from runtime.launch.examination import Wish, examine
    from runtime.launch.interpreters import program
    from runtime.launch.signals import Signals
    from runtime.launch.terminal import Terminal
    from runtime.launch.voice import Voice

    check(arguments.command, verb="doctor")
    if arguments.seconds is not None and not 0 < arguments.seconds < float("inf"):
        raise UsageError(f"--seconds {arguments.seconds:g}: a number above 0")
    settings = load(cli.flags(arguments))
    permitted = [each for text in arguments.allow for each in _permitted(text)]
    wish = Wish(permitted, arguments.seconds, False if arguments.no_strace else None)
    agent = program(arguments.command).encode("utf-8", "replace").decode()
    signals = Signals(Terminal(), ignored_signals())
    with _standard_output(apart=arguments.json) as out:
        try:
            async with await Keeping.open(settings, cli.SIDECAR) as keeping:
                signals.install()
                kit = await asyncio.to_thread(lay_out, keeping.folder)
                order = launcher.Order(arguments.command, agent=agent, kit=kit)
                found = await examine(settings, order, wish, keeping, signals, Voice())
        finally:
            signals.close()
        if found is None:
            return signals.leave(128 + (signals.interrupted_by() or signal.SIGINT))
        if arguments.json:
            os.write(out, json.dumps(as_json(found), indent=2).encode() + b"\n")
        else:
            print("\n".join(lines(found)), file=sys.stderr)
    return WELL if found.well else NOT_WELL


@contextlib.contextmanager
def _standard_output(*, apart: bool) -> Iterator[int]:
    """A descriptor of the standard output. *apart*: whoever is started meanwhile writes to standard error instead."""
    sys.stdout.flush()
    out = os.dup(1)
    try:
        if apart:
            os.dup2(2, 1)
        yield out
    finally:
        os.dup2(out, 1)
        os.close(out)


def _permitted(text: str) -> list[Allowed]:
    """What ``--allow`` names; of a name, all addresses that it has now."""
    try:
        host, port = allowed(text)
        if not host:
            return [Allowed(None, port)]
        with contextlib.suppress(ValueError):
            return [Allowed(ipaddress.ip_network(host, strict=False), port)]
        found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
        return [Allowed(ipaddress.ip_network(each), port) for each in sorted(found)]
    except (ValueError, OSError, UnicodeError) as error:
        raise UsageError(f"--allow {text}: HOST, HOST:PORT, :PORT or NETWORK ({error})") from error
