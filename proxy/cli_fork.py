"""``twiceshy fork``: a run that goes another way from one of its steps on."""

import argparse
import json

from proxy.cli_runs import connection
from runtime import verbs
from runtime.forks import Fork


async def fork(arguments: argparse.Namespace) -> int:
    """Make a new run of one, or say what it would be."""
    async with connection() as conn:
        made = await verbs.fork(
            conn, arguments.run, before=arguments.before, run_id=arguments.new, preview=arguments.preview
        )
    if arguments.json:
        print(json.dumps(_as_json(arguments.run, made), indent=2))
        return 0
    if made.run is None:
        print("\n".join(_lines(made)))
        return 0
    going = "a worker does it" if made.for_workers else f"to start it: twiceshy run --run {made.run} -- COMMAND"
    print(f"run {made.run}: {_many(len(made.replayed))} of {arguments.run} {_is(made.replayed)} replayed; {going}")
    return 0


def _many(count: int) -> str:
    return "one step" if count == 1 else f"{count or 'no'} steps"


def _is(steps: tuple[object, ...]) -> str:
    return "is" if len(steps) == 1 else "are"


def _lines(made: Fork) -> list[str]:
    """A line for each step of the run that is forked."""
    width = len(str(len(made.replayed) + len(made.sent)))
    lines = [f"{step.n:>{width}}  replayed  {step.shown}" for step in made.replayed]
    return lines + [f"{step.n:>{width}}  anew      {step.shown}" for step in made.sent] or ["no steps"]


def _as_json(run: str, made: Fork) -> dict[str, object]:
    return {
        "run": made.run,
        "forked_from": run,
        "replayed": [{"n": step.n, "step": step.key, "what": step.shown} for step in made.replayed],
        "sent": [{"n": step.n, "step": step.key, "what": step.shown} for step in made.sent],
    }
