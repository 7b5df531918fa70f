"""A worker: runs of declared agents, some at a time, taken from the queue until it is told to stop. Shell.

* Each attempt is started, watched and ended as ``twiceshy run`` does it (``Attempt``): a process group of its own,
  which is killed with the worker. Its input is ``GET http://twiceshy.internal/run``, its standard input is empty, its
  output is the worker's.
* It looks each ``poll`` for runs that are due, and for those whose worker is dead: by the clock, or by a lock of this
  folder. Hints (LISTEN) only make it look sooner; through a pooler there are none. It also forgets old keys of starts.
* SIGTERM, SIGINT, SIGHUP: no new runs; those that are on have ``drain_agents`` seconds, then they are interrupted,
  which counts for nothing. The second signal: at once.
* A worker that was stopped past its leases finds them lost when it goes on, ends those agents and writes nothing.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Mapping

from runtime import database, events, queue
from runtime.agents import AgentTable
from runtime.errors import DatabaseAway, UsageError
from runtime.keeping import Keeping
from runtime.launch import crew
from runtime.launch.agent import CannotStart, Command, Program
from runtime.launch.attempt import Attempt, Ended, Why
from runtime.launch.conclusion import Conclusion, conclude, failed, give_up
from runtime.launch.environment import Kit
from runtime.launch.patient import Patient
from runtime.launch.python_agent import ForkServer
from runtime.launch.signals import GRACE, Signals
from runtime.launch.terminal import Terminal
from runtime.launch.voice import Voice
from runtime.settings import Settings

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: How long the ends of attempts may take to be written down when the worker stops, in seconds.
LAST_WORDS = 10.0
#: Between two tries to listen, and between two looks whether the listening connection still stands, in seconds.
LISTEN_AGAIN = 5.0
KEEPALIVE = 30.0
NO_TERMINAL = -1
#: How often old keys of starts are looked for, in seconds. Nothing waits for it.
FORGET_EACH = 60.0


class Worker:
    """One worker process. ``agents``: those that it runs; their commands can be started."""

    def __init__(
        self, settings: Settings, agents: Mapping[str, AgentTable], keeping: Keeping, kit: Kit, voice: Voice,
        ignored: frozenset[int],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.agents = agents
        self.keeping = keeping
        self.kit = kit
        self.voice = voice
        self.ignored = ignored
        self.host = socket.gethostname()
        self.id, self.lock = crew.enroll(keeping.folder)
        # Who looks for work may have to wait for a lock; leases are renewed on another connection.
        self.looking = Patient(lambda: keeping.dsn, "worker", voice.say)
        self.holding = Patient(lambda: keeping.dsn, "worker leases", voice.say)
        self.programs = {name: self._program(name, table) for name, table in agents.items()}
        self.jobs: dict[asyncio.Task[None], Signals] = {}
        #: Something changed: look again.
        self.news = asyncio.Event()
        self.told = 0
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def _program(self, name: str, table: AgentTable) -> Program:
        if table.python is None:
            return Command(table.command, table.folder)
        keeping, patience = self.keeping, self.settings.preload_timeout
        return ForkServer(name, table, self.kit, lambda: keeping.proxy, self.voice.say, patience)

    async def run(self) -> int:
        """Work until told to stop. Returns the exit code: 0, or 128 + the signal that came a second time."""
        loop = asyncio.get_running_loop()
        taken = [number for number in STOPS if number not in self.ignored]
        for number in taken:
            loop.add_signal_handler(number, self._stop, number)
        looking, keeper = asyncio.create_task(self._look()), asyncio.create_task(self._watch_keeper())
        listening = asyncio.create_task(self._listen())
        self.voice.say(f"worker {self.id}: {', '.join(sorted(self.agents))}; {self.settings.slots} at a time")
        told = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({looking, keeper, told}, return_when=asyncio.FIRST_COMPLETED)
            for watched in (looking, keeper):
                if watched.done():
                    watched.result()
            await asyncio.wait({looking}, timeout=LAST_WORDS)  # a claim on its way is not cut off
            await self._drain()
            return 128 + self.told if self.hurry.is_set() else 0
        finally:
            for number in taken:
                loop.remove_signal_handler(number)
            tasks = (looking, keeper, listening, told, *self.jobs)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for program in self.programs.values():
                if isinstance(program, ForkServer):
                    await program.close()
            await self.looking.close()
            await self.holding.close()
            self.lock.release()

    # ---- stopping

    def _stop(self, number: int) -> None:
        self.told = number
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
        self.news.set()

    async def _drain(self) -> None:
        if self.jobs:
            agents = "one agent goes" if len(self.jobs) == 1 else f"{len(self.jobs)} agents go"
            self.voice.say(f"worker {self.id} stops; {agents} on for {self.settings.drain_agents:g} s at most")
        await self._all_done(self.settings.drain_agents)
        for signals in self.jobs.values():
            signals.interrupt(signal.SIGTERM)
        await self._all_done(GRACE + LAST_WORDS)
        for signals in self.jobs.values():
            signals.enough.set()
        if self.jobs:
            await asyncio.wait(self.jobs, timeout=LAST_WORDS)

    async def _all_done(self, seconds: float) -> None:
        """Return when no agent is left, after *seconds*, or when told to hurry."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.jobs and not self.hurry.is_set() and loop.time() < end:
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), end - loop.time())

    # ---- looking for work

    async def _look(self) -> None:
        """Put back what the dead have left, take what is due, wait; until told to stop."""
        loop = asyncio.get_running_loop()
        recover_at = forget_at = loop.time()
        while not self.stop.is_set():
            self.news.clear()
            if loop.time() >= recover_at:
                await self._recover()
                recover_at = loop.time() + self.settings.poll
            if loop.time() >= forget_at:
                more = await self.looking.ask(queue.forget_starts, retention=self.settings.start_key_retention)
                forget_at = loop.time() + (0 if more else FORGET_EACH)
            while len(self.jobs) < self.settings.slots and not self.stop.is_set():
                job = await self.looking.ask(
                    queue.claim_next, sorted(self.agents), worker=self.id, host=self.host,
                    folder=str(self.keeping.folder), lease=self.settings.lease,
                )  # fmt: skip
                if job is None:
                    break
                self._begin(job)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), self.settings.poll)

    async def _recover(self) -> None:
        """Queue again whose time to wake has come, and whose worker is dead."""
        ask = self.looking.ask
        await ask(events.wake)
        lease, backoff, folder = self.settings.lease, self.settings.backoff, str(self.keeping.folder)
        for gone, path in crew.dead(self.keeping.folder):
            while run := await ask(
                queue.requeue_of_dead, [gone], host=self.host, folder=folder, lease=lease, backoff=backoff
            ):
                self.voice.say(f"run {run}: its worker {gone} is dead; queued again")
            if not await ask(queue.is_owner, gone, host=self.host, folder=folder):
                path.unlink(missing_ok=True)
        while run := await ask(queue.requeue_silent, lease=lease, backoff=backoff):
            self.voice.say(f"run {run}: its attempt was not heard of for longer than its lease; queued again")

    async def _watch_keeper(self) -> None:
        """Fail when there will be no sidecar any more."""
        known = None
        while True:
            known = await self.keeping.changed(known)

    async def _listen(self) -> None:
        """Look as soon as something is queued."""
        while not database.through_pooler(self.keeping.dsn):
            with contextlib.suppress(DatabaseAway, *database.ERRORS):
                connection = await database.connect(self.keeping.dsn, name="worker hints")
                try:
                    await connection.add_listener(queue.CHANNEL, lambda *_: self.news.set())
                    self.news.set()
                    while True:
                        await asyncio.sleep(KEEPALIVE)
                        with database.bounded(connection, database.CONNECT_TIMEOUT):
                            await connection.fetchval(database.sql("now"))
                finally:
                    connection.terminate()
            await asyncio.sleep(LISTEN_AGAIN)

    # ---- working

    def _begin(self, job: queue.Job) -> None:
        signals = Signals(Terminal(NO_TERMINAL), self.ignored)
        task = asyncio.create_task(self._do(job, signals))
        self.jobs[task] = signals
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        del self.jobs[task]
        self.news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.voice.say(f"worker {self.id}: {type(error).__name__}: {error}")

    async def _do(self, job: queue.Job, signals: Signals) -> None:
        """One attempt, and what follows from its end."""
        table, claim = self.agents[job.agent], job.claim
        own = {name: getattr(table, name) for name in ("max_attempts", "attempt_timeout", "idle_timeout")}
        settings = self.settings.model_copy(update={name: value for name, value in own.items() if value is not None})
        where = f"run {claim.run_id} ({job.agent}): attempt {claim.n}"
        self.voice.say(where)
        concluded = await self._attempt(settings, job, signals)
        stood = "is not ours any more" if concluded.status is None else f"the run is {concluded.status}"
        advice = f"; twiceshy show {claim.run_id}" if concluded.status and concluded.status.stopped else ""
        self.voice.say(f"{where}: {': '.join(filter(None, (stood, concluded.words)))}{advice}")

    async def _attempt(self, settings: Settings, job: queue.Job, signals: Signals) -> Conclusion:
        if job.claim.barren >= settings.max_attempts:
            return await give_up(self.holding, settings, job.claim)
        program = self.programs[job.agent]
        attempt = Attempt(
            settings, job.claim, program, self.keeping, self.holding, signals, self.kit,
            idle_timeout=settings.idle_timeout,
        )  # fmt: skip
        try:
            ended = await attempt.run()
        except (CannotStart, OSError) as error:
            return await failed(self.holding, settings, job.claim, "failed", None, str(error))
        except UsageError:  # there is no sidecar, and will be none: no fault of the agent
            ended = Ended(Why.INTERRUPTED)
        return await conclude(self.holding, settings, job.claim, ended)
