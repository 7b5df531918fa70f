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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID
from weakref import WeakValueDictionary

from proxy.doors import Door
from proxy.identity import Named, Target, Tunnel
from proxy.peers import Process, group_alive
from proxy.policy import Permit
from proxy.recorder import Exchange
from proxy.refusals import Refusal
from proxy.tape import Step, Tape, Where, build
from runtime.entries import AnswerRow, Bound, Fence, Fenced, Stopped, TapeRows
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.lease import LAUNCHED
from runtime.runs import end_attempt, hash_token, last_attempt
from runtime.settings import Settings
from runtime.step import Effect, Finality, RunStatus, State

log = logging.getLogger("twiceshy.attempts")
_STOPS = {RunStatus.AMBIGUOUS: "ambiguous", RunStatus.DIVERGED: "diverged", RunStatus.OVER_BUDGET: "over-budget"}
#: How much of a lease is left unused when it is trusted without asking: for clocks that run apart.
_MARGIN = 0.1
#: How many hints of one attempt are kept, and of how many attempts that nobody has heard of.
HINTS = 20
_EARLY = 1000
#: How many hosts' requests are counted apart, for each attempt; those of further ones are counted together.
HOSTS, OTHERS = 200, "other hosts"
#: Seconds for which an attempt that is over is remembered.
_REMEMBERED = 60.0


class Passing(Protocol):
    """A connection of a client that is passed through."""

    def cut(self) -> None:
        """End it at once, so that both ends see it cut."""


class Run:
    """A run's current attempt, in the memory of the sidecar it lives with."""

    def __init__(self, fence: Fence, bound: Bound, rows: TapeRows, tape: Tape, lease: float) -> None:
        self.run_id = fence.run_id
        self.fence = fence
        self.uuid: UUID = bound.uuid
        self.agent = rows.agent
        self.tape = tape
        self.exchanges: dict[UUID, Exchange] = {}
        self.ended: dict[UUID, tuple[AnswerRow | None, State | None]] = {}
        self.refusal: Refusal | None = None
        self.serving: dict[Door, Step | None] = {}  # clients being answered, and what for
        self.passing: set[Passing] = set()
        self.outdated = False  # another process moved a step: the journal must be read again
        self.hints: list[str] = []  # what a person should know of this attempt
        self.arrived: dict[str, dict[str, int]] = {}  # requests, by host and what became of them
        # Clients that had their answers a moment ago, and nothing has begun since; how that is undone.
        self.delivered: dict[Door, Callable[[], None]] = {}
        self.coming: set[Door] = set()  # clients whose requests are not understood yet
        self.turned_away = 0  # of these: so many never were, and may be tried again
        self.permits: dict[str, Permit] = {}  # of the local steps that it does, by their keys
        self.owned = rows.owned  # who has its process starts the next attempt, too
        self.tokenless = False
        self.stale = ""  # tokenless: why nobody can say where its process stands, in words
        self.finished = False  # its result is here, and no launcher will say when it ends
        self.idle_since = time.monotonic()
        self.saved: bytes = b""
        self.process: Process | None = None  # tokenless: the first process that spoke
        self._clock = rows.now.timestamp() - time.monotonic()
        self._lease = lease
        self.confirm(bound)

    def confirm(self, bound: Bound) -> None:
        self.trusted_until = time.monotonic() + bound.lease_left - self._lease * _MARGIN

    def now(self) -> float:
        """Seconds by the database's clock."""
        return time.monotonic() + self._clock

    @property
    def attached(self) -> bool:
        """A client waits on an exchange of this run, or is passed through: a long call is not a dead agent."""
        return bool(self.serving or self.passing) or any(exchange.clients for exchange in self.exchanges.values())

    @property
    def idle(self) -> float:
        """Seconds for which nothing came from it, and nothing was under way that it waits for."""
        return 0.0 if self.attached else time.monotonic() - self.idle_since

    def refuse(self, refusal: Refusal) -> None:
        """From now on every request of the attempt gets *refusal*, and what is open to it is cut."""
        if self.refusal is None:
            self.refusal = refusal
            log.info("run %s: %s", self.run_id, refusal.code)
            for exchange in list(self.exchanges.values()):
                exchange.give_up(refusal)
        for passing in list(self.passing):
            passing.cut()

    @contextmanager
    def understanding(self, door: Door) -> Iterator[None]:
        """It is being found out what the client at *door* asks for; who fails meanwhile may come again."""
        self.coming.add(door)
        try:
            yield
        except BaseException:
            self.turned_away += 1
            raise
        finally:
            self.coming.discard(door)

    def strays(self, beside: Door) -> bool:
        """The client at *beside* may be one that asked before and was not understood."""
        return self.turned_away > 0 or any(door.look() for door in self.coming if door is not beside)

    def note(self, words: str) -> None:
        """Keep what a person should know of this attempt."""
        _keep(self.hints, words)

    def count(self, target: Target, how: str, instead: str | None = None) -> None:
        """What arrived for *target*: ``journalled``, ``passthrough``, ``refused``, ``tunnel`` or ``WebSocket``.

        *instead*: what it was counted as before.
        """
        if target.internal:
            return
        host = target.host if target.port in (80, 443) else f"{target.host}:{target.port}"
        if host not in self.arrived and len(self.arrived) >= HOSTS:
            host = OTHERS
        counts = self.arrived.setdefault(host, {})
        counts[how] = counts.get(how, 0) + 1
        if instead is not None:
            counts[instead] -= 1
            if not counts[instead]:
                del counts[instead]

    def cut_clients(self) -> None:
        for door in list(self.serving):
            door.abort()

    def outcome_refusal(self, outcome: Fenced | Stopped) -> Refusal:
        return refusal_of(self.run_id, outcome)

    def settled(self, exchange: Exchange, row: AnswerRow | None, state: State | None) -> None:
        """An exchange ended. It may be of an earlier attempt: its step is looked up in today's tape."""
        self.exchanges.pop(exchange.id, None)
        if exchange.step is None:
            return
        state = state if row is not None else exchange.step.state
        self.ended[exchange.id] = (row, state)
        step = self.tape.steps.get(exchange.step.key)
        if step is not None and step.where is Where.HERE and _has(exchange, step):
            _apply(self.tape, step, row, state)

    def exchange_of(self, step: Step) -> Exchange:
        """The exchange that is under way here for *step*."""
        return next(exchange for exchange in self.exchanges.values() if _has(exchange, step))

    def report(self) -> dict[str, object]:
        """What the attempt did so far, for the launcher, the tape and the summary."""
        tape = self.tape
        parts = [[key, part.value] for key, part in tape.parts.items()]
        counts = {part: sum(1 for _, p in parts if p == part) for part in ("live", "replayed", "joined")}
        return {
            "run": self.run_id, "attempt": tape.attempt, **counts, "drift": tape.drift,
            "calls_saved": tape.calls_saved, "tokens_saved": tape.tokens_saved,
            "open": self.open, "unheard": self.unheard, "hints": self.hints, "steps": parts,
            "arrived": self.arrived,
        }  # fmt: skip

    @property
    def unheard(self) -> list[str]:
        """Steps of this attempt whose last answer is not final, and came when nobody was there to hear it."""
        return [
            step.key
            for step in self.tape.steps.values()
            if step.claimed
            and step.had < len(step.answers)
            and step.clients == 0
            and step.answers[-1].facts.finality is not Finality.FINAL
        ]

    @property
    def open(self) -> int:
        """How many exchanges are still out, with an upstream."""
        return sum(1 for exchange in self.exchanges.values() if exchange.ending is None and exchange.inner is None)


def _has(exchange: Exchange, step: Step) -> bool:
    """*step* is under way in *exchange*, which this attempt began, or one before it."""
    return exchange.step is step or step.exchange == exchange.id


def _apply(tape: Tape, step: Step, row: AnswerRow | None, state: State | None) -> None:
    if row is not None and state is not None:
        tape.record(step, row, state)
        return
    step.where = Where.NOWHERE
    step.state = state
    if state is not State.SENT:
        step.exchange = None


def continued(run_id: str, successor: str) -> Refusal:
    """The words for whoever has a run that went on as *successor*."""
    return Refusal(
        "continued", f"Run {run_id} is done: it goes on as run {successor}. This process should end.", run_id
    )


def refusal_of(run_id: str, outcome: Fenced | Stopped) -> Refusal:
    """The words for a request that the journal does not let act."""
    if isinstance(outcome, Fenced):
        if outcome.sidecar is not None:
            return Refusal(
                "sidecar-changed",
                f"This attempt of run {run_id} began with another sidecar process ({outcome.sidecar}) and ends "
                "with it. Start the agent again; its launcher does so by itself.",
                run_id,
            )
        return Refusal(
            "fenced",
            f"The token is not that of run {run_id}'s current attempt: another attempt took the run over, or the "
            "token was not made by twiceshy. Nothing was sent. This process should end.",
            run_id,
        )
    code = _STOPS.get(outcome.status)
    if code is not None:
        return Refusal(code, outcome.message or f"Run {run_id} is stopped.", run_id, outcome.step)
    if outcome.status is RunStatus.PARKED:
        return Refusal("parked", f"Run {run_id} is parked: it waits, and its agent is started again then.", run_id)
    if outcome.continued_as is not None:
        return continued(run_id, outcome.continued_as)
    return Refusal(
        "not-running",
        f"Run {run_id} is {outcome.status}, not running. Nothing was sent. `twiceshy show {run_id}` tells more.",
        run_id,
    )


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
                _apply(tape, step, *ended)
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
        _keep(hints, words)

    def take_hints(self, run: Run) -> None:
        """Give *run* what was noted before it was known here."""
        for who in _names(run):
            early = self._early_hints.pop(who, [])
            run.hints += [words for words in early if words not in run.hints][: HINTS - len(run.hints)]

    def exchanges(self) -> list[Exchange]:
        return [exchange for run in self._runs.values() for exchange in run.exchanges.values()]


def _keep(hints: list[str], words: str) -> None:
    if words not in hints and len(hints) < HINTS:
        hints.append(words)


def _names(run: Run) -> list[tuple[str, bytes | None]]:
    """By what the tunnels of *run*'s clients may name it."""
    names: list[tuple[str, bytes | None]] = [(run.run_id, run.fence.token_hash)]
    return [*names, (run.run_id, None)] if run.tokenless else names
