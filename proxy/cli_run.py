"""``twiceshy run`` and ``twiceshy up``."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from proxy import cli, cli_api
from proxy.kit import lay_out
from runtime import payload
from runtime.errors import UsageError
from runtime.settings import load


def text_or_file(given: str) -> bytes:
    """*given* itself, or the content of the file that ``@FILE`` names. Raises UsageError."""
    if not given.startswith("@"):
        return given.encode("utf-8", "surrogateescape")
    try:
        return Path(given[1:]).read_bytes()
    except OSError as error:
        raise UsageError(f"{given[1:]}: {error.strerror}") from error


async def run(arguments: argparse.Namespace) -> int:
    """Start, watch and restart an agent. Its streams are its own; ours is standard error."""
    from runtime.keeping import Keeping
    from runtime.launch import launcher
    from runtime.launch.agent import ignored_signals
    from runtime.launch.attempt import check
    from runtime.launch.interpreters import program
    from runtime.launch.signals import Signals
    from runtime.launch.terminal import Terminal
    from runtime.launch.voice import Voice

    check(arguments.command)
    settings = load(cli.flags(arguments))
    given = None
    if arguments.input is not None:
        given = text_or_file(arguments.input)
        payload.read(given, len(given), "--input")
    order = launcher.Order(
        command=arguments.command, run=arguments.run, input=given, no_wait=arguments.no_wait,
        agent=arguments.agent or program(arguments.command).encode("utf-8", "replace").decode(),
    )  # fmt: skip
    ignored = ignored_signals()
    signals = Signals(Terminal(), ignored)
    voice = Voice(quiet=arguments.quiet)
    try:
        async with await voice.while_opening(Keeping.open(settings, cli.SIDECAR, cli.API)) as keeping:
            # Not earlier: until here Ctrl-C simply ends us.
            signals.install()
            order = replace(order, kit=await asyncio.to_thread(lay_out, keeping.folder))
            code = await launcher.run(settings, order, keeping, signals, voice)
    finally:
        signals.close()
    return signals.leave(code)


def up(arguments: argparse.Namespace) -> int:
    """Keep database and sidecar in the foreground until Ctrl-C."""
    from runtime import keeping

    if not arguments.host:
        raise UsageError("--host is empty, which would be every address of this machine: say 0.0.0.0 if you mean that")
    for flag, port in (("--port", arguments.port), ("--api-port", arguments.api_port or 0)):
        if not 0 <= port < 65536:
            raise UsageError(f"{flag} {port}: a number from 0 (a free one) to 65535")
    api_port = cli_api.PORT if arguments.api_port is None and arguments.port == 7777 else arguments.api_port
    return keeping.up(
        load(cli.flags(arguments)), cli.SIDECAR, host=arguments.host, port=arguments.port, api_command=cli.API,
        api_port=api_port,
    )  # fmt: skip
