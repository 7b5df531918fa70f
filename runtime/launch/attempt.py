"""One attempt: an agent from its start to its end, watched. Shell.

What may end it, and what that means, are the values of ``Why``. Whatever ends it, no process of it is left
when ``Attempt.run`` returns.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from runtime import database, runs
from runtime.errors import UsageError
from runtime.keeping import Keeping
from runtime.launch import sidecar
from runtime.launch.agent import Agent, Exit, Listener, Program
from runtime.launch.environment import Kit, environment
from runtime.launch.patient import Patient
from runtime.launch.signals import Signals
from runtime.settings import Settings
from runtime.step import Finality, RunStatus, State

#: What an agent gets between SIGTERM and SIGKILL when its run is stopped, in seconds.
GRACE = 5.0


class Why(StrEnum):
    """Why an attempt ended."""

    EXITED = "exited"  # the agent's own end
    UNHEARD = "unheard"  # it ended well, but an exchange still out then got no final answer
    STOPPED = "stopped"  # the run is not running any more: stopped, cancelled, parked
    OVERDUE = "overdue"  # it took longer than it may, or was silent for longer
    LOST = "lost"  # another attempt has the run
    SIDECAR = "sidecar"  # its sidecar was replaced
    INTERRUPTED = "interrupted"  # by a signal


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. ``exit``: how its agent did, by itself or ended by us."""

    why: Why
    exit: Exit | None = None
    words: str = ""


class Watch(Protocol):
    """Somebody who follows an agent's processes."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What the agent is given besides."""

    def begin(self, group: int) -> None:
        """The processes of *group*, and whatever comes from them, are about to start."""


class Attempt:
    """One attempt of a claimed run."""

    def __init__(
        self, settings: Settings, claim: runs.Claim, program: Program, keeping: Keeping, patient: Patient,
        signals: Signals, kit: Kit | None = None, watch: Watch | None = None, idle_timeout: float | None = None,
    ) -> None:  # fmt: skip
        """*idle_timeout*: how long it may do nothing that can be seen; None: for ever."""
        self.settings = settings
        self.claim = claim
        self.program = program
        self.keeping = keeping
        self.patient = patient
        self.signals = signals
        self.kit = kit
        self.watch = watch
        self.idle_timeout = idle_timeout
        self.token_hash = runs.hash_token(claim.token)
        self.proxy = keeping.proxy
        self.sidecar = keeping.sidecar

    async def run(self) -> Ended:
        """Start the agent and see it through. Raises UsageError when it cannot be started."""
        env = environment(
            os.environ, run=self.claim.run_id, token=self.claim.token, proxy=self.proxy, kit=self.kit,
            database=database.split(self.keeping.dsn)[0],
        )  # fmt: skip
        if self.watch is not None:
            env |= self.watch.environment
        # What starts the agent may take longer than a lease: libraries that are imported first, a machine that swaps.
        holding = asyncio.create_task(self._watch_run())
        try:
            agent = await self._start(env, holding)
            return agent if isinstance(agent, Ended) else await self._see_through(agent, holding)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def _start(self, env: Mapping[str, str], holding: "asyncio.Task[Ended]") -> Agent | Ended:
        """Start the agent; how the attempt ended, if it did before."""
        listener = Listener(self._begin, self.signals.of_group, self.signals.of_stop)
        starting = asyncio.ensure_future(self.program.start(env, self.signals.ignored, listener))
        enough = asyncio.create_task(self._enough())
        try:
            await asyncio.wait({starting, holding, enough}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            enough.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
        if starting.cancelled():
            return holding.result() if holding.done() else Ended(Why.INTERRUPTED)
        return starting.result()

    async def _see_through(self, agent: Agent, holding: "asyncio.Task[Ended]") -> Ended:
        """From the agent's start to its end."""
        self.signals.agent = agent
        try:
            ended = await self._first(
                self._judge(agent),
                holding,
                self._watch_sidecar(),
                self._enough(),
                self._watch_clock(),
                self._watch_idle(),
            )
            own = agent.exit.done()
            exit_ = await agent.end(GRACE if ended.why in (Why.STOPPED, Why.OVERDUE) else 0)
            if ended.why in (Why.STOPPED, Why.INTERRUPTED, Why.OVERDUE):
                await sidecar.ask(self.proxy, self.claim.run_id, self.claim.token)  # the tape is written down
            return replace(ended, exit=exit_ if own or ended.exit is None else ended.exit)
        finally:
            await agent.end(0)
            self.signals.terminal.take(reset=agent.exit.result().code < 0)

    def _begin(self, group: int) -> None:
        """The agent's group is there, its first instruction is not."""
        if self.watch is not None:
            self.watch.begin(group)
        self.signals.terminal.offer(group)

    async def _first(self, *ways: "Coroutine[Any, Any, Ended] | asyncio.Task[Ended]") -> Ended:
        """The first of *ways* that comes to an end; of several at once the first named."""
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the ways in which an attempt ends

    async def _enough(self) -> Ended:
        await self.signals.enough.wait()
        return Ended(Why.INTERRUPTED)

    async def _watch_run(self) -> Ended:
        """Keep the lease; end when it is lost or the run is not running any more."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + self.settings.lease / 3
        while True:
            await asyncio.sleep(min(self.settings.poll, self.settings.lease / 3))
            if loop.time() >= renew_at:
                renew_at = loop.time() + self.settings.lease / 3
                status = await self.patient.ask(runs.renew, self.claim.run_id, self.token_hash, self.settings.lease)
            else:
                status = await self.patient.ask(runs.standing, self.claim.run_id, self.token_hash)
            if status is None:
                return Ended(Why.LOST, words="another attempt has taken the run over")
            if status is not RunStatus.RUNNING:
                return Ended(Why.STOPPED, words=f"the run is {status}")

    async def _watch_clock(self) -> Ended:
        """End when the attempt takes too long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), self.settings.attempt_timeout)
        return Ended(Why.OVERDUE, words=f"it took longer than attempt_timeout = {self.settings.attempt_timeout} s")

    async def _watch_idle(self) -> Ended:
        """End when nothing was heard of the agent for too long: no request, no step, no heartbeat."""
        left = limit = self.idle_timeout
        if left is None or limit is None:
            await asyncio.Event().wait()  # its program may be at work for as long as it likes
            raise AssertionError
        while left > 0:
            await asyncio.sleep(max(left, self.settings.poll))
            if (await self.patient.ask(runs.get_run, self.claim.run_id)).sidecar is None:
                break  # it has not spoken at all; to ask for it would bind it to the sidecar that serves now
            told = await sidecar.ask(self.proxy, self.claim.run_id, self.claim.token)
            left = limit - told.idle if isinstance(told, sidecar.Told) else limit
        return Ended(Why.OVERDUE, words=f"it made no request, step or heartbeat for idle_timeout = {limit:g} s")

    async def _watch_sidecar(self) -> Ended:
        """End when the sidecar that this attempt lives with is not the one that serves now."""
        known = self.sidecar
        while True:
            known = await self.keeping.changed(known)
            run = await self.patient.ask(runs.get_run, self.claim.run_id)
            # An agent that has not spoken yet lives with none, and finds the new one at the same address.
            if self.keeping.proxy != self.proxy or run.sidecar not in (None, self.keeping.sidecar):
                return Ended(Why.SIDECAR, words="its sidecar was replaced")

    async def _judge(self, agent: Agent) -> Ended:
        """The agent's own end, once it is known what it was worth.

        An agent whose sidecar died under it fails, or swallows the error and ends well: neither counts. One
        that ended well may have left exchanges behind, which end first.
        """
        ended = await asyncio.shield(agent.exit)
        if self.signals.interrupted_by(ended):
            return Ended(Why.INTERRUPTED, ended)
        # Asking binds, so this is asked first. One that has spoken is served by the sidecar that it began with, or
        # refused; for others it may be that they could reach none, and only our own view of the sidecars can tell.
        spoke = (await self.patient.ask(runs.get_run, self.claim.run_id)).sidecar is not None
        missed = False
        unheard: set[str] = set()
        pause = 0.02
        give_up = asyncio.get_running_loop().time() + self.settings.exchange_timeout
        while asyncio.get_running_loop().time() < give_up:
            told = await sidecar.ask(self.keeping.proxy, self.claim.run_id, self.claim.token)
            if isinstance(told, sidecar.Refused):
                if told.code == "sidecar-changed":
                    return Ended(Why.SIDECAR, ended, "its sidecar was replaced")
                if told.code == "parked":
                    return Ended(Why.STOPPED, ended, "the run is parked")
                return Ended(Why.EXITED, ended)  # fenced, stopped: the database has the last word
            if isinstance(told, sidecar.Told):
                if not spoke and (missed or (self.keeping.sidecar != self.sidecar and ended.code != 0)):
                    return Ended(Why.SIDECAR, ended, "its sidecar was replaced")
                unheard |= told.unheard
                if told.open == 0 or ended.code != 0:
                    break
                if not unheard:
                    steps = await self.patient.ask(runs.steps, self.claim.run_id)
                    unheard = {step.key for step in steps if step.state is State.SENT}
            else:
                missed = True
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 1.0)
        if unheard and ended.code == 0:
            for step in await self.patient.ask(runs.steps, self.claim.run_id):
                if step.key in unheard and (step.state, step.finality) != (State.ANSWERED, Finality.FINAL):
                    words = f"{step.method} {step.url}, still out when the agent ended, got no final answer"
                    return Ended(Why.UNHEARD, ended, words)
        return Ended(Why.EXITED, ended)


def check(command: Sequence[str], verb: str = "run", folder: str = "") -> None:
    """Raise UsageError if *command*, in *folder*, can certainly not be started: before a run is made for it."""
    import shutil

    if not command:
        raise UsageError(f"no command: twiceshy {verb} [options] -- COMMAND…")
    # Not by Path, which makes "./agent" a name to be looked for in PATH.
    program = os.path.join(folder, command[0]) if "/" in command[0] else command[0]  # noqa: PTH118
    if shutil.which(program) is None:
        with contextlib.suppress(OSError):
            if Path(program).is_file():
                raise UsageError(f"cannot start {command[0]!r}: not executable")
        raise UsageError(f"cannot start {command[0]!r}: no such file or command")
