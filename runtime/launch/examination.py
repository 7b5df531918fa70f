"""``twiceshy doctor``: one attempt of an agent, watched, and what became of its requests. Shell.

The run is one of its own, and like any other: its journal stays. It is attempted once.
"""

import asyncio
import json
import os
import shlex
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime import runs
from runtime.keeping import Keeping
from runtime.launch import launcher, probes, watcher
from runtime.launch.agent import Command
from runtime.launch.attempt import Attempt, Ended, Why, check
from runtime.launch.diagnosis import Connection, Diagnosis, Probe, live, service
from runtime.launch.environment import PROXY_NAMES, environment
from runtime.launch.patient import Patient
from runtime.launch.sightings import Address, Allowed, address
from runtime.launch.signals import Signals
from runtime.launch.voice import Voice
from runtime.settings import Settings

T = TypeVar("T")

#: What is seen at the moment when it happens is said so often; the report has all.
SAID = 20


@dataclass(frozen=True, slots=True)
class Wish:
    """How the agent is to be examined. ``seconds``: it is ended after that; ``strace``: None to take it if it works."""

    permitted: Sequence[Allowed] = field(default_factory=tuple)
    seconds: float | None = None
    strace: bool | None = None


async def examine(
    settings: Settings, order: launcher.Order, wish: Wish, keeping: Keeping, signals: Signals, voice: Voice
) -> Diagnosis | None:
    """Run the agent once and say what was seen; None: interrupted before it was started.

    Raises UsageError when it cannot be started.
    """
    check(order.command)
    assert order.kit is not None
    patient = Patient(lambda: keeping.dsn, "doctor", voice.say)
    lock = None
    try:
        run = await patient.ask(runs.create, None, agent=order.agent, input=order.input)
        lock = launcher.hold(keeping.folder, run)
        claim = await patient.ask(
            runs.claim, run, kind="launcher", host=socket.gethostname(), folder=str(keeping.folder),
            lease=settings.lease,
        )  # fmt: skip
        voice.say(f"run {run}: it is run once, and what it does is done for real; `twiceshy show {run}` has it after")
        given = environment(os.environ, run=run, token=claim.token, proxy=keeping.proxy, kit=order.kit)
        answered = await _unless(signals, probes.ask(order.command, given, run=run, sidecar=keeping.sidecar))
        if answered is None:
            await _write_down(patient, claim, Ended(Why.INTERRUPTED))
            return None
        who, asked = answered
        await patient.ask(runs.renew, run, runs.hash_token(claim.token), settings.lease)
        strace, why = (None, "") if wish.strace is False else await asyncio.to_thread(watcher.tracer)
        must = {name: given[name] for name in PROXY_NAMES}
        must |= {"PYTHONPATH": str(order.kit.site), "NODE_OPTIONS": str(order.kit.preload)}
        with watcher.Watcher(must, _sidecar(keeping), wish.permitted, strace, _aloud(voice)) as watch:
            program = Command(watch.command(order.command))
            attempt = Attempt(settings, claim, program, keeping, patient, signals, order.kit, watch)
            ended, words = await _attempt(attempt, wish)
            watch.end()
            await _write_down(patient, claim, ended)
            row, last = await patient.ask(runs.get_run, run), await patient.ask(runs.last_attempt, run)
            return _diagnosis(
                order, row, words, who, asked, watch, _limits(strace, why, watch), None if last is None else last.tape
            )
    finally:
        if lock is not None:
            lock.release()
        await patient.close()


async def _unless(signals: Signals, work: Coroutine[Any, Any, T]) -> T | None:
    """What *work* comes to; None when we are interrupted before."""
    working = asyncio.create_task(work)
    enough = asyncio.create_task(signals.enough.wait())
    try:
        await asyncio.wait({working, enough}, return_when=asyncio.FIRST_COMPLETED)
        return None if enough.done() else working.result()
    finally:
        enough.cancel()
        working.cancel()
        await asyncio.gather(enough, working, return_exceptions=True)


def _sidecar(keeping: Keeping) -> Address:
    host, _, port = keeping.proxy.rpartition(":")
    return address(host.strip("[]"), int(port))


def _aloud(voice: Voice) -> Callable[[Connection], None]:
    """Says what goes past the sidecar when it is seen: an agent may run for long."""
    said: set[str] = set()

    def say(seen: Connection) -> None:
        line = live(seen)
        if line not in said and len(said) < SAID and not service(seen):
            said.add(line)
            voice.say(line)

    return say


async def _attempt(attempt: Attempt, wish: Wish) -> tuple[Ended, str]:
    """See it through. Returns how it ended, also in words."""
    timer = None
    if wish.seconds is not None:
        timer = asyncio.get_running_loop().call_later(wish.seconds, attempt.signals.enough.set)
    try:
        ended = await attempt.run()
    finally:
        if timer is not None:
            timer.cancel()
    if ended.why is Why.INTERRUPTED:
        interrupted = attempt.signals.interrupted_by() is not None
        return ended, "interrupted" if interrupted or wish.seconds is None else f"ended after {wish.seconds:g} s"
    if ended.words:
        return ended, ended.words
    return ended, ended.exit.words if ended.exit is not None else str(ended.why)


async def _write_down(patient: Patient, claim: runs.Claim, ended: Ended) -> None:
    """End the attempt as a launcher would that starts it no more."""
    code = None if ended.exit is None else ended.exit.code
    outcome = {Why.INTERRUPTED: "interrupted", Why.SIDECAR: "handed_over", Why.STOPPED: "stopped"}.get(ended.why)
    if outcome is None:
        well = ended.why is Why.EXITED and code == 0
        outcome = "done" if well else "died" if code is not None and code < 0 else "failed"
    error = None if outcome == "done" or ended.exit is None else ended.words or f"the agent: {ended.exit.words}"
    token = runs.hash_token(claim.token)
    if ended.why is not Why.LOST:
        await patient.ask(runs.end_attempt, claim.run_id, token, outcome, code, final=True, error=error)


def _limits(strace: str | None, why: str, watch: watcher.Watcher) -> list[str]:
    limits = []
    if strace is None:
        limits.append(
            "Python and Node tell of all their connections where our sitecustomize or preload is loaded; of others "
            f"those shorter than {watcher.BEAT * 1000:g} ms may be missed, and refused ones mostly are"
        )
        limits.append("where unconnected datagrams go is not seen")
        limits.append(f"strace tells of every call{f', but {why}' if why else ''}")
    else:
        limits.append("every call of every process that connects or sends a datagram; not what io_uring does")
    limits.append("not what other processes do for it (a daemon, containers): only what comes from it itself")
    limits += [f"pid {pid} ({command}) may not be looked into" for pid, command in watch.unseen.items()]
    if watch.overflowed:
        limits.append(f"more than {watcher.MOST} connections: the later ones are not remembered")
    return limits


def _diagnosis(
    order: launcher.Order, row: runs.RunRow, ended: str, who: str, asked: list[Probe], watch: watcher.Watcher,
    limits: list[str], tape: bytes | None,
) -> Diagnosis:  # fmt: skip
    told = _report(tape)
    hints = [str(hint) for hint in told.get("hints", ())]
    notes = []
    if ended not in ("exit code 0", "interrupted"):
        notes.append("what it would have done after its end was not seen")
    if row.status.stopped:
        notes.append(f"the run is {row.status}, and its requests were refused: `twiceshy show {row.id}` says why")
    if not asked:
        notes.append("no client was tried beforehand: the program's interpreter is not known, and there is no curl")
    if tape is None:
        notes.append("the sidecar wrote down nothing of this attempt: which requests arrived is not known")
    return Diagnosis(
        row.id, shlex.join(order.command), ended, watch.how, limits, who, asked,
        arrived={str(host): dict(fates) for host, fates in told.get("arrived", {}).items()},
        distrusts=[hint for hint in hints if not hint.startswith(probes.HOST)],
        connections=watch.connections(), notes=notes,
        failure=watch.failure,
    )  # fmt: skip


def _report(tape: bytes | None) -> dict[str, Any]:
    """What the sidecar saw of the attempt; empty when that cannot be read."""
    try:
        told = json.loads(tape or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
