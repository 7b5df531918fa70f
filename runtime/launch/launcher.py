"""The launcher of one run: attempt after attempt until it is done, stopped, given up or interrupted. Shell.

* One launcher per run and state folder, by lock. Who has the lock knows that the launcher of the previous
  attempt is dead, and with it (guardian) its agent: the run is taken over at once, without waiting for a
  lease to expire.
* The first restart comes at once, then with growing pauses. ``max_attempts`` bounds consecutive attempts that
  brought no new step; hand-overs and interruptions do not count.
* A run that parks is waited for without a process, or left to whoever starts it again (``no_wait``).
* A run that has ended is not started: its result is printed. One that is stopped says what settles it. One that goes on
  as another is followed, to the newest.

Exit codes: DESIGN §9.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from runtime import events, kin, runs
from runtime.errors import DatabaseAway, Held, NotNow, UsageError
from runtime.folder import Lock, make_folder
from runtime.keeping import Keeping
from runtime.launch.agent import Command
from runtime.launch.attempt import Attempt, Ended, Why, check
from runtime.launch.conclusion import conclude, give_up
from runtime.launch.environment import Kit
from runtime.launch.patient import Patient
from runtime.launch.signals import Signals
from runtime.launch.voice import Voice
from runtime.settings import Settings
from runtime.step import RunStatus
from runtime.summary import summary, until
from runtime.tapes import read_tape

#: How long an interrupted launcher waits for a database that is away, in seconds.
LAST_WORDS = 10.0


class Code(IntEnum):
    """Exit codes of ``twiceshy run``; an interrupted one ends with 128 + the signal's number."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    STOPPED = 3
    CANCELLED = 4
    BUSY = 75


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run. ``run`` None: a new run."""

    command: Sequence[str]
    run: str | None = None
    agent: str = ""
    input: bytes | None = None
    no_wait: bool = False  # end when the run parks
    kit: Kit | None = None


async def run(settings: Settings, order: Order, keeping: Keeping, signals: Signals, voice: Voice) -> int:
    """See the run through. Returns the exit code. Raises UsageError, Held and NotFound with words."""
    check(order.command)
    patient = Patient(lambda: keeping.dsn, "run", voice.say)
    work = asyncio.create_task(_run(settings, order, keeping, signals, voice, patient))
    enough = asyncio.create_task(signals.enough.wait())
    try:
        await asyncio.wait({work, enough}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            # Interrupted: the end is written down, unless the database stays away.
            await asyncio.wait({work}, timeout=LAST_WORDS)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        if work.cancelled():
            return 128 + (signals.interrupted_by() or signal.SIGINT)
        return work.result()
    finally:
        enough.cancel()
        await patient.close()


async def _run(
    settings: Settings, order: Order, keeping: Keeping, signals: Signals, voice: Voice, patient: Patient
) -> int:
    run_id = await patient.ask(runs.create, order.run, agent=order.agent, input=order.input)
    code: int | None = None
    stdin = _start_of_input()
    # A run that goes on as another one is seen through to the end of that one.
    while code in (None, Code.DONE) and ((newest := await patient.ask(kin.newest, run_id)) != run_id or code is None):
        if newest != run_id:
            voice.tell(f"run {run_id} goes on as run {newest}")
        run_id = newest
        lock = hold(keeping.folder, run_id)
        try:
            code = await Launcher(settings, order, run_id, keeping, signals, voice, patient, stdin).run()
            if code in (Code.DONE, Code.FAILED, Code.CANCELLED):
                # Nobody starts an ended run: its lock file is of no more use.
                lock.path.unlink(missing_ok=True)
        finally:
            lock.release()
    assert code is not None
    return code


def hold(folder: Path, run_id: str) -> Lock:
    """The lock of the run's launcher. Raises Held."""
    make_folder(folder / "runs")
    lock = Lock(folder / "runs" / f"{run_id}.lock")
    if not lock.take():
        raise Held(f"run {run_id} is being run by another twiceshy (pid {lock.owner()}) on this machine")
    return lock


class Launcher:
    """The attempt loop of one run. Its lock is held already."""

    def __init__(
        self, settings: Settings, order: Order, run_id: str, keeping: Keeping, signals: Signals, voice: Voice,
        patient: Patient, stdin: int | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.order = order
        self.run_id = run_id
        self.keeping = keeping
        self.signals = signals
        self.voice = voice
        self.patient = patient
        self.host = socket.gethostname()
        self.stdin = stdin

    async def run(self) -> int:
        started = False
        while True:
            row = await self.patient.ask(runs.get_run, self.run_id)
            parked = row.status is RunStatus.PARKED
            if row.status.ended or row.status.stopped or (parked and self.order.no_wait):
                return await self._report(row, started=started)
            if self.signals.interrupted_by():
                return self._interrupted()
            if parked:
                await self._until_due(row)
                continue
            try:
                claim = await self._claim()
            except NotNow:
                continue  # it ended or stopped between the two questions
            if claim.barren >= self.settings.max_attempts:
                await give_up(self.patient, self.settings, claim)
                continue
            started = True
            self._rewind()
            where = f"run {self.run_id} · attempt {claim.n}"
            self.voice.tell(where if claim.n > 1 else f"{where} · {self.keeping.proxy}")
            code = await self._attempt(claim)
            if code is not None:
                return code

    async def _until_due(self, row: runs.RunRow) -> None:
        """Wait, with no process, until the parked run is queued again, or we are interrupted."""
        self.voice.tell(f"run {self.run_id} is parked: it waits {until(row.wake_at, row.wake_on or ())}")
        while not self.signals.interrupted_by():
            await self.patient.ask(events.wake)
            if (await self.patient.ask(runs.get_run, self.run_id)).status is not RunStatus.PARKED:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.signals.enough.wait(), self.settings.poll)

    async def _claim(self) -> runs.Claim:
        """Become the run's next attempt. Raises Held, NotNow."""
        # Our lock proves a launcher of this folder dead; of other owners only the clock can tell (runtime.lease).
        return await self.patient.ask(
            runs.claim_silent, self.run_id, kind="launcher", host=self.host, folder=str(self.keeping.folder),
            lease=self.settings.lease, proved_dead=True, say=self.voice.say,
        )  # fmt: skip

    async def _attempt(self, claim: runs.Claim) -> int | None:
        """One attempt and what follows from its end. Returns the exit code, None to look again."""
        attempt = Attempt(
            self.settings, claim, Command(self.order.command), self.keeping, self.patient, self.signals, self.order.kit
        )
        try:
            ended = await attempt.run()
        except UsageError:
            await conclude(self.patient, self.settings, claim, Ended(Why.INTERRUPTED))
            raise
        concluded = await conclude(self.patient, self.settings, claim, ended)
        if ended.why is Why.INTERRUPTED:
            return await self._interrupted_summary()
        if concluded.status is None:
            self.voice.say(f"run {self.run_id}: {concluded.words}")
            return Code.BUSY
        if concluded.status is RunStatus.QUEUED and concluded.words:
            self.voice.say(f"run {self.run_id}: attempt {claim.n}: {concluded.words}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.signals.enough.wait(), concluded.pause)
        return None

    # ---- words

    async def _report(self, row: runs.RunRow, *, started: bool) -> int:
        """The run is not to be started (again): say why, and how it went."""
        picture = await self.patient.ask(read_tape, self.run_id)
        lines = summary(picture)
        told = 1 if row.continued_as is None else 2
        smooth = row.status is RunStatus.DONE and len(picture.attempts) == 1 and len(lines) == told
        if started:
            (self.voice.tell if smooth else self.voice.say)("\n".join(lines))
        elif row.status is RunStatus.DONE:
            self.voice.tell(f"run {self.run_id} is done already; its result:")
            sys.stdout.buffer.write((row.result if row.result is not None else b"null") + b"\n")
            sys.stdout.buffer.flush()
        elif row.status is RunStatus.PARKED:
            self.voice.say(f"run {self.run_id} is not started: it waits {until(row.wake_at, row.wake_on or ())}")
        else:
            again = [f"to let it go on: twiceshy retry {self.run_id}"] if row.status.ended else []
            self.voice.say("\n".join([f"run {self.run_id} is not started: it is {row.status}", *lines[1:], *again]))
        codes = {RunStatus.DONE: Code.DONE, RunStatus.FAILED: Code.FAILED, RunStatus.CANCELLED: Code.CANCELLED}
        return codes.get(row.status, Code.BUSY if row.status is RunStatus.PARKED else Code.STOPPED)

    async def _interrupted_summary(self) -> int:
        if self.voice.chatty:
            with contextlib.suppress(DatabaseAway, TimeoutError):
                picture = await asyncio.wait_for(self.patient.ask(read_tape, self.run_id), 5)
                self.voice.tell("\n".join(summary(picture)))
        return self._interrupted()

    def _interrupted(self) -> int:
        number = self.signals.interrupted_by() or signal.SIGINT
        self.voice.say(
            f"run {self.run_id} was interrupted ({signal.Signals(number).name}); to go on: "
            f"twiceshy run --run {self.run_id} -- …"
        )
        return 128 + number

    # ---- input

    def _rewind(self) -> None:
        """Each attempt reads its input from the top, where that can be: from a file, not from a pipe."""
        if self.stdin is not None:
            with contextlib.suppress(OSError):
                os.lseek(0, self.stdin, os.SEEK_SET)


def _start_of_input() -> int | None:
    try:
        return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return None
