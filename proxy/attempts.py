"""The runs that this sidecar serves, and which attempt of each may act through it.

``Attempts.of`` answers a named request with the run's current attempt, or with the refusal it gets. Fencing is
the database's: a token is bound in the first request's transaction, checked again in every intent, and
confirmed each third of a lease in between; replays and reads rest on the last confirmation.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from weakref import WeakValueDictionary

from proxy.identity import Named, Tunnel
from proxy.peers import group_alive
from proxy.recorder import Exchange
from proxy.refusals import Refusal
from proxy.run import HINTS, Run, keep
from proxy.stops import refusal_of
from proxy.tape import Where, build
from runtime.entries import Bound, Fence, Fenced, Stopped, TapeRows
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.lease import LAUNCHED
from runtime.runs import end_attempt, hash_token, last_attempt
from runtime.settings import Settings
from runtime.step import Effect, State

log = logging.getLogger("twiceshy.attempts")
#: Of how many attempts that nobody has heard of hints are kept.
_EARLY = 1000
#: Seconds for which an attempt that is over is remembered.
_REMEMBERED = 60.0


class Attempts:
    """All runs of this sidecar."""

    def __init__(self, journal: Journal, settings: Settings, sidecar: str) -> None:
        self._journal = journal
        self._settings = settings
        self._sidecar = sidecar
        self._runs: dict[str, Run] = {}
        self._early_hints: OrderedDict[tuple[str, bytes | None], list[str]] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # anybody may name any run

    async def of(self, named: Named) -> Run | Refusal:
        """The current attempt of a run named with its token. Raises DatabaseAway."""
        assert named.token is not None
        token_hash = hash_token(named.token)
        run = self._runs.get(named.run)
        if run is not None and run.fence.token_hash == token_hash:
            return await self.trusted(run)
        return await self.bind(Fence(named.run, token_hash, self._sidecar))

    async def trusted(self, run: Run) -> Run | Refusal:
        """*run*, if its lease is confirmed or can be now."""
        if time.monotonic() > run.trusted_until:
            await self.confirmed(run)
        return run.refusal or run

    async def confirmed(self, run: Run) -> Refusal | None:
        """What every request of *run* gets by now, as the database has it. Raises DatabaseAway."""
        if run.refusal is None:
            await self._renew([run], extend=False)
        return run.refusal

    async def prolong(self, run: Run) -> Refusal | None:
        """Its process lives: its lease lasts longer. What its requests get from now on. Raises DatabaseAway."""
        if run.refusal is None:
            await self._renew([run], extend=True)
        return run.refusal

    async def bind(self, fence: Fence) -> Run | Refusal:
        """First request of an attempt here: bind it to this sidecar and read its run's journal."""
        lock = self._locks.setdefault(fence.run_id, asyncio.Lock())
        async with lock:
            run = self._runs.get(fence.run_id)
            if run is not None and run.fence == fence:
                return await self.trusted(run)
            bound = await self._journal.bind(fence)
            if not isinstance(bound, Bound):
                return refusal_of(fence.run_id, bound)
            rows = await self._journal.load(fence.run_id)
            if rows is None or rows.attempt != bound.n:
                return refusal_of(fence.run_id, Fenced())
            taken = self._take(run, fence, bound, rows)
            reach("claimed")
            return taken

    def _take(self, old: Run | None, fence: Fence, bound: Bound, rows: TapeRows) -> Run:
        # Reads of an earlier attempt record nothing and are joined by nobody; what it waited for is waited for anew.
        earlier = old.exchanges if old is not None else {}
        exchanges = {
            name: exchange
            for name, exchange in earlier.items()
            if exchange.effect is not Effect.READ and exchange.inner is None
        }
        tape = build(rows, set(exchanges))
        for step in tape.steps.values():
            # The rows were read a moment ago: an exchange of ours that ended since is taken from memory.
            ended = old.ended.get(step.exchange) if old is not None and step.exchange is not None else None
            if step.state is State.SENT and ended is not None:
                step.where = Where.HERE
                tape.ended(step, *ended)
        known = old.tape.steps if old is not None and old.tape.attempt == rows.attempt - 1 else {}
        tape.unheard = frozenset(key for key in tape.steps if key not in known or not known[key].had)
        run = Run(fence, bound, rows, tape, self._settings.lease)
        run.exchanges = exchanges
        for exchange in exchanges.values():
            exchange.owned_by(run)
        if old is not None:
            old.refuse(refusal_of(fence.run_id, Fenced()))
            old.cut_clients()
        self._runs[fence.run_id] = run
        self.take_hints(run)
        return run

    async def refresh(self, run: Run) -> None:
        """Read the journal again: another process moved a step. What the attempt has had stays. Raises DatabaseAway."""
        rows = await self._journal.load(run.run_id)
        if rows is None:
            return
        run.outdated = False
        fresh = build(rows, set(run.exchanges))
        for step in fresh.steps.values():
            known = run.tape.steps.get(step.key)
            if known is None:
                run.tape.add(step)
            elif known.where is not Where.HERE and step.exchange not in run.ended:
                # What an exchange of ours left behind is known better here: the rows may be older.
                known.state, known.exchange, known.where = step.state, step.exchange, step.where
                known.answers, known.place = step.answers, step.place
        run.tape.last_begun = max(run.tape.last_begun, fresh.last_begun)

    async def look(self, run: Run) -> None:
        """Learn what was recorded past this sidecar: by ``twiceshy.record_step``. Raises DatabaseAway."""
        open_ = [key for key, permit in run.permits.items() if permit.transaction]
        for key, row in await self._journal.recorded(run.run_id, open_) if open_ else ():
            step = run.tape.steps[key]
            if step.state is State.SENT and step.where is Where.NOWHERE:
                run.tape.record(step, row)
                step.had = len(step.answers)  # who recorded it has it
                run.permits.pop(key, None)

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def running(self) -> list[Run]:
        """Those that nothing has stopped."""
        return [run for run in self._runs.values() if run.refusal is None]

    # ---- between requests

    async def renew(self) -> None:
        """Confirm every attempt, and prolong those that live. Raises DatabaseAway."""
        loop = asyncio.get_running_loop()
        runs = self.running()
        held = [run for run in runs if run.attached]
        for run in runs:
            if (
                run.process is not None
                and run not in held
                and await loop.run_in_executor(None, group_alive, run.process)
            ):
                held.append(run)
        await self._renew(held, extend=True)
        await self._renew([run for run in runs if run not in held], extend=False)

    async def tend(self) -> None:
        """Save tapes; end and forget idle attempts. Raises DatabaseAway."""
        for run in list(self._runs.values()):
            await self.save(run)
            if run.exchanges or run.serving:
                continue
            now = time.monotonic()
            unheld = run.tokenless or now > run.trusted_until  # no launcher renews its lease
            if run.refusal is None and run.finished:
                await self._end(run, "done")
            elif (
                run.refusal is None
                and not run.passing
                and unheld
                and now - run.idle_since > self._settings.idle_timeout
            ):
                await self._end(run, "failed", f"no request for {self._settings.idle_timeout:g} s (idle_timeout)")
            # Only what an attempt has had tells a repetition from a replay: it is never forgotten before its end.
            # Nor right after it: an attempt that failed tells the next one which answers it had.
            if run.refusal is not None and now - run.idle_since > _REMEMBERED:
                self._runs.pop(run.run_id, None)

    async def finish(self, run: Run) -> None:
        """Its result is here. Where no launcher waits for an exit code, the attempt ends. Raises DatabaseAway."""
        last = await self._journal.ask(lambda connection: last_attempt(connection, run.run_id))
        run.finished = last is not None and last.n == run.tape.attempt and last.kind not in LAUNCHED
        if run.finished and not run.open:  # else with the last exchange, see ``tend``
            await self._end(run, "done")

    async def fail(self, run: Run, words: str, pause: float) -> None:
        """End an attempt that gets no further; nobody takes its run for *pause* seconds. Raises DatabaseAway."""
        await self._end(run, "failed", words, pause)

    async def _end(self, run: Run, outcome: str, words: str | None = None, pause: float | None = None) -> None:
        """End an attempt in the place of a launcher."""
        token_hash = run.fence.token_hash
        status = await self._journal.ask(
            lambda connection: end_attempt(connection, run.run_id, token_hash, outcome, None, error=words, pause=pause)
        )
        run.refuse(refusal_of(run.run_id, Fenced() if status is None else Stopped(status, None, words)))

    async def _renew(self, runs: list[Run], *, extend: bool) -> None:
        if not runs:
            return
        found = await self._journal.renew([run.fence for run in runs], extend=extend)
        for run in runs:
            outcome = found.get(run.run_id, Fenced())
            if isinstance(outcome, Bound):
                run.confirm(outcome)
                continue
            run.refuse(refusal_of(run.run_id, outcome))
            if isinstance(outcome, Fenced) and run.serving:
                log.warning("run %s was taken over: %d clients are cut", run.run_id, len(run.serving))
                run.cut_clients()

    async def save(self, run: Run) -> None:
        """Write down what the attempt did, for the tape; information, never a decision."""
        report = json.dumps(run.report()).encode("ascii")
        if report != run.saved:
            await self._journal.save_tape(run.run_id, run.tape.attempt, report)
            run.saved = report

    def note(self, tunnel: Tunnel, words: str) -> None:
        """A client's TLS failed inside *tunnel*: kept for the summary of its run.

        Most likely nothing of that attempt has come through yet, and its launcher will be the first to ask.
        """
        if tunnel.named is None:
            return
        who = (tunnel.named.run, None if tunnel.named.token is None else hash_token(tunnel.named.token))
        run = self._runs.get(tunnel.named.run)
        if run is not None and who in _names(run):
            hints = run.hints
        else:
            hints = self._early_hints.setdefault(who, [])
            while len(self._early_hints) > _EARLY:
                self._early_hints.popitem(last=False)
        keep(hints, words)

    def take_hints(self, run: Run) -> None:
        """Give *run* what was noted before it was known here."""
        for who in _names(run):
            early = self._early_hints.pop(who, [])
            run.hints += [words for words in early if words not in run.hints][: HINTS - len(run.hints)]

    def exchanges(self) -> list[Exchange]:
        return [exchange for run in self._runs.values() for exchange in run.exchanges.values()]


def _names(run: Run) -> list[tuple[str, bytes | None]]:
    """By what the tunnels of *run*'s clients may name it."""
    names: list[tuple[str, bytes | None]] = [(run.run_id, run.fence.token_hash)]
    return [*names, (run.run_id, None)] if run.tokenless else names
