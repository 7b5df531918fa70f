"""``twiceshy worker``, and what steers the runs that workers do: ``start``, ``cancel``, ``retry``."""

import argparse
import asyncio
import json
import os
from pathlib import Path

from proxy import cli
from proxy.cli_run import text_or_file
from proxy.cli_runs import connection
from proxy.kit import lay_out
from runtime import attributes, queue, runs, verbs
from runtime.agents import AgentTable, check_input, declared
from runtime.errors import UsageError
from runtime.settings import load
from runtime.step import RunStatus


async def worker(arguments: argparse.Namespace) -> int:
    """Do the runs of declared agents until SIGTERM."""
    from runtime.keeping import Keeping
    from runtime.launch.agent import ignored_signals
    from runtime.launch.voice import Voice
    from runtime.launch.worker import Worker

    settings = load(cli.flags(arguments))
    names = arguments.agent or sorted(settings.agents)
    if not names:
        raise UsageError("no agent is declared: say [agents.NAME] in twiceshy.toml (docs/workers.md)")
    agents = {name: declared(settings.agents, name) for name in names}
    for name, table in agents.items():
        _startable(name, table)
    ignored = ignored_signals()
    # Several agents at a time cannot share what is typed here.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    voice = Voice()
    async with await voice.while_opening(Keeping.open(settings, cli.SIDECAR, cli.API)) as keeping:
        kit = await asyncio.to_thread(lay_out, keeping.folder)
        return await Worker(settings, agents, keeping, kit, voice, ignored).run()


def _startable(name: str, table: AgentTable) -> None:
    from runtime.launch.attempt import check
    from runtime.launch.python_agent import interpreter

    if not Path(table.folder).is_dir():
        raise UsageError(f"agent {name}: folder {table.folder} is no folder")
    try:
        if table.python is None:
            check(table.command, "worker", table.folder)
        else:
            interpreter(table)
    except UsageError as error:
        raise UsageError(f"agent {name}: {error}") from error


async def start(arguments: argparse.Namespace) -> int:
    """Queue a run of a declared agent, and print its id."""
    settings = load()
    table = declared(settings.agents, arguments.agent)
    given = None if arguments.input is None else text_or_file(arguments.input)
    if given is not None and len(given) > settings.input_max:
        raise UsageError(f"the input has {len(given)} bytes; input_max is {settings.input_max}")
    check_input(arguments.agent, table, given)
    async with connection() as conn:
        run = await queue.start(
            conn,
            arguments.agent,
            given,
            run_id=arguments.run,
            key=arguments.key,
            priority=arguments.priority,
            attributes=dict(attributes.read(each) for each in arguments.attribute),
        )
        status = (await runs.get_run(conn, run)).status if arguments.json else None
    print(json.dumps({"run": run, "agent": arguments.agent, "status": status}) if arguments.json else run)
    return 0


async def cancel(arguments: argparse.Namespace) -> int:
    """End a run, however it stands."""
    async with connection() as conn:
        was = await verbs.cancel(conn, arguments.run)
    if arguments.json:
        print(json.dumps({"run": arguments.run, "status": RunStatus.CANCELLED, "was": was}))
    elif was is RunStatus.CANCELLED:
        print(f"run {arguments.run} was cancelled before")
    else:
        print(f"run {arguments.run} is cancelled; it was {was}")
    return 0


async def retry(arguments: argparse.Namespace) -> int:
    """Queue an ended run again."""
    async with connection() as conn:
        status = await verbs.retry(conn, arguments.run)
        row = await runs.get_run(conn, arguments.run)
        if row.for_workers and status is RunStatus.QUEUED:
            await queue.hint(conn, row.id)
    if arguments.json:
        print(json.dumps({"run": row.id, "status": status, "reason": row.stop_message}))
    elif status is RunStatus.AMBIGUOUS:
        print(f"run {row.id} needs an answer first: {row.stop_message}\nto go on: twiceshy resolve {row.id} "
              f"{row.stop_step} assume_done|send_again")  # fmt: skip
    elif row.for_workers:
        print(f"run {row.id} is queued; a worker goes on with it")
    else:
        print(f"run {row.id} is open again; to go on: twiceshy run --run {row.id} -- COMMAND")
    return 0
