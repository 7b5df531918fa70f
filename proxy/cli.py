"""``twiceshy``: the command line. Composes runtime and proxy; every verb calls the functions that the API does.

Errors are one line on standard error. Exit codes: 0 well, 1 not, 2 usage, 75 busy or database away (try again
later); ``run`` has more.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from runtime.errors import DatabaseAway, Held, NotFound, TwiceshyError, UsageError
from runtime.names import readable
from runtime.settings import TABLES, Settings

#: What the keeper starts as the sidecar.
SIDECAR = (sys.executable, "-m", "proxy.sidecar")
#: And beside it.
API = (sys.executable, "-m", "proxy.api")

Verb = Callable[[argparse.Namespace], "Awaitable[int] | int"]


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting that is one value, with the setting's own help."""
    group = parser.add_argument_group(
        "settings", "Those of twiceshy.toml and TWICESHY_NAME, for this once (docs/settings.md). In seconds and bytes."
    )
    for name, field in Settings.model_fields.items():
        if name not in TABLES:
            text = f"{field.description} (default: {field.default})".replace("%", "%%")
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=f"setting_{name}", metavar="VALUE", help=text)


def flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags."""
    given = vars(arguments).items()
    return {name.removeprefix("setting_"): value for name, value in given if name.startswith("setting_")}


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    from proxy import (
        cli_api,
        cli_approvals,
        cli_ca,
        cli_doctor,
        cli_event,
        cli_fork,
        cli_run,
        cli_runs,
        cli_shell,
        cli_worker,
    )

    top = argparse.ArgumentParser(
        prog="twiceshy", description="Agents that never do it twice.", allow_abbrev=False,
        epilog="The database is DATABASE_URL, or an embedded one when that is not set.",
    )  # fmt: skip
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, act: Verb, text: str, *, settings: bool = False, usage: str = "") -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(act=act)
        if settings:
            # argparse would put all settings before what matters.
            added.usage = f"twiceshy {name} [options]{usage}"
            _add_settings(added)
        return added

    run = verb("run", cli_run.run, "run an agent until it is done, whatever dies in between", settings=True,
               usage=" -- COMMAND…")  # fmt: skip
    run.add_argument("--run", metavar="ID", help="the run to start or to go on with (default: a new one)")
    run.add_argument("--agent", metavar="NAME", help="the agent's name (default: the program's, as in agent.py)")
    run.add_argument("--input", metavar="JSON", help="input of a new run, JSON; @FILE reads it from a file")
    run.add_argument("--no-wait", action="store_true", help="end (with 75) when the run parks")
    run.add_argument("-q", "--quiet", action="store_true", help="say nothing unless something happened")
    run.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    text = "run a command once and say what of it goes past the sidecar, with the remedy; it does what it does"
    doctor = verb("doctor", cli_doctor.doctor, text, settings=True, usage=" -- COMMAND…")
    doctor.add_argument("--allow", action="append", default=[], metavar="ADDRESS",
                        help="HOST, HOST:PORT, :PORT or NETWORK that may be reached past the sidecar")  # fmt: skip
    doctor.add_argument("--seconds", type=float, metavar="N", help="end the command after so long (default: never)")
    doctor.add_argument("--no-strace", action="store_true", help="watch by looking at /proc alone")
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs; the command's output goes to "
                        "standard error")  # fmt: skip
    doctor.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    start = verb("start", cli_worker.start, "queue a run of a declared agent for the workers, and print its id")
    start.add_argument("agent", metavar="AGENT", help="its name in twiceshy.toml")
    start.add_argument("--input", metavar="JSON", help="what it works on; @FILE reads it from a file")
    start.add_argument("--run", metavar="ID", help="the id of the run (default: a new one)")
    start.add_argument("--key", metavar="KEY", help="equal starts with an equal key are one run")
    start.add_argument("--attribute", action="append", default=[], metavar="NAME:VALUE", help="to find it by")
    start.add_argument("--priority", type=int, default=0, metavar="N", help="higher ones go first (default: 0)")
    start.add_argument("--json", action="store_true", help="as JSON, for programs")

    text = "do the runs of declared agents, some at a time, until SIGTERM"
    worker = verb("worker", cli_worker.worker, text, settings=True)
    worker.add_argument("--agent", action="append", metavar="NAME", help="only this one; again for more (default: all)")

    cancel = verb("cancel", cli_worker.cancel, "end a run, however it stands")
    retry = verb("retry", cli_worker.retry, "let a failed, cancelled or diverged run go on from its journal")
    for each in (cancel, retry):
        each.add_argument("run", metavar="RUN")
        each.add_argument("--json", action="store_true", help="as JSON, for programs")

    fork = verb("fork", cli_fork.fork, "make a run that has what another one had before a step, and does the rest anew")
    fork.add_argument("run", metavar="RUN")
    fork.add_argument("--before", type=int, required=True, metavar="N", help="the first step that is done anew: its "
                      "number in `twiceshy show`")  # fmt: skip
    fork.add_argument("--run", dest="new", metavar="ID", help="the id of the new run (default: a new one)")
    fork.add_argument("--preview", action="store_true", help="only say which steps are replayed, and which are not")
    fork.add_argument("--json", action="store_true", help="as JSON, for programs")

    text = "be the sidecar, the API (and the embedded database) in the foreground"
    up = verb("up", cli_run.up, text, settings=True)
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    up.add_argument("--port", type=int, default=7777, help="the proxy's port (default: %(default)s)")
    text = f"the API's port (default: {cli_api.PORT}; with another --port a free one, which it keeps)"
    up.add_argument("--api-port", type=int, metavar="PORT", help=text)

    text = "be an API of the database in the foreground; with --show, tell how to reach the one that runs"
    api = verb("api", cli_api.api, text, settings=True)
    api.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    api.add_argument("--port", type=int, default=cli_api.PORT, help="0: a free one (default: %(default)s)")
    api.add_argument("--show", action="store_true", help="print address and key as shell lines, and listen nowhere")
    api.add_argument("--json", action="store_true", help="with --show: as JSON, for programs")

    show = verb("show", cli_runs.show, "show a run's tape: attempts side by side")
    show.add_argument("run", metavar="RUN")
    show.add_argument("--json", action="store_true", help="as JSON, for programs")

    runs = verb("runs", cli_runs.runs, "list runs, the newest first")
    runs.add_argument("--status", metavar="STATUS", help="only those that are so")
    runs.add_argument("--agent", metavar="NAME", help="only those of this agent")
    runs.add_argument("--attribute", action="append", default=[], metavar="NAME:VALUE", help="only those that have it; "
                      "again: all of them")  # fmt: skip
    runs.add_argument("--limit", type=int, default=50, metavar="N", help="how many (default: %(default)s)")
    runs.add_argument("--json", action="store_true", help="as JSON, for programs")

    env = verb("env", cli_shell.env, 'shell lines that put this shell\'s programs under a run: eval "$(twiceshy env)"',
               settings=True)  # fmt: skip
    env.add_argument("--run", metavar="ID", help="the run (default: a new one)")

    claim = verb("claim", cli_shell.claim, "claim a run and print the token to act for it", settings=True,
                 usage=" RUN")  # fmt: skip
    claim.add_argument("run", metavar="RUN")
    claim.add_argument("--json", action="store_true", help="token and environment of the agent, for programs")

    resolve = verb("resolve", cli_runs.resolve, "settle a step whose outcome is not known")
    resolve.add_argument("run", metavar="RUN")
    resolve.add_argument("step", metavar="STEP", help="its key or number, or a beginning that fits no other open one")
    how = "assume_done: it happened, and the agent gets the answer given here; send_again: it did not"
    resolve.add_argument("how", choices=["assume_done", "send_again"], help=how)
    resolve.add_argument("--status", type=int, help="of the answer (default: 200)")
    resolve.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="of the answer")
    body = "of the answer (default: {}, as JSON); @FILE reads it from a file"
    resolve.add_argument("--body", metavar="TEXT", help=body)
    resolve.add_argument("--json", action="store_true", help="as JSON, for programs")

    event = verb("event", cli_event.event, "send a run an event, which one wait for it takes")
    event.add_argument("run", metavar="RUN")
    event.add_argument("name", metavar="NAME")
    event.add_argument("--id", metavar="ID", help="one that was sent before sends nothing (default: a new one)")
    event.add_argument("--payload", metavar="JSON", help="what it says (default: null); @FILE reads it from a file")
    event.add_argument("--json", action="store_true", help="as JSON, for programs")

    waiting = verb("approvals", cli_approvals.listed, "list what runs wait for a person to decide, the oldest first")
    waiting.add_argument("--run", metavar="RUN", help="only of this one")
    waiting.add_argument("--name", metavar="NAME", help="only those of this name")
    waiting.add_argument("--limit", type=int, default=50, metavar="N", help="how many (default: %(default)s)")
    waiting.add_argument("--json", action="store_true", help="as JSON, for programs")
    approve = verb("approve", cli_approvals.approve, "decide what a run waits for: yes; the first decision stands")
    decline = verb("decline", cli_approvals.decline, "decide what a run waits for: no; the first decision stands")
    for each in (approve, decline):
        each.add_argument("run", metavar="RUN")
        each.add_argument("name", metavar="NAME", help="of the approval, or its id where the run asked more than once")
        each.add_argument("--by", metavar="WHO", help="who says so")
        each.add_argument("--comment", metavar="TEXT")
        each.add_argument("--json", action="store_true", help="as JSON, for programs")

    ca = verb("ca", cli_ca.ca, "show the CA certificate that agents must trust: its file and fingerprint")
    ca.add_argument("--export", metavar="FILE", help="write the certificate (never the key) to a file; -: print it")
    ca.add_argument("--rotate", action="store_true", help="make a new CA first; no sidecar may run")

    verb("init-db", cli_runs.init_db, "make or upgrade the tables, and nothing else")
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """*argv* as arguments. What comes after the first ``--`` of ``run``, ``doctor`` is the agent's, untouched."""
    words = list(argv)
    command: list[str] | None = None
    if words[:1] in (["run"], ["doctor"]) and "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    arguments = parser().parse_args(words)
    if command is not None:
        if arguments.command:
            raise UsageError(
                f"{arguments.command[0]!r} stands before the --: twiceshy {words[0]} [options] -- COMMAND…"
            )
        arguments.command = command
    for name in ("run", "step", "agent", "key", "name"):
        given = getattr(arguments, name, None)
        if isinstance(given, str) and not given.isprintable():  # nor are the bytes that are no UTF-8
            raise UsageError(f"{name} {given!r}: no name")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``twiceshy``."""
    _open_standard_streams()
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        result = arguments.act(arguments)
        code = result if isinstance(result, int) else asyncio.run(result)
        sys.stdout.flush()
    except TwiceshyError as error:
        print(f"twiceshy: {readable(str(error))}", file=sys.stderr)
        if isinstance(error, Held | DatabaseAway):
            return 75  # EX_TEMPFAIL: the same again, later
        return 2 if isinstance(error, UsageError | NotFound) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `twiceshy runs | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    return code


def _open_standard_streams() -> None:
    """A closed one would be taken by the next file that is opened, and be written to by whoever thinks it is his."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
