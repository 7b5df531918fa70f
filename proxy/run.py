"""A run's current attempt, in the memory of the sidecar that it lives with: its tape, what is out for it, who waits."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID

from proxy.doors import Door
from proxy.identity import Target
from proxy.peers import Process
from proxy.policy import Permit
from proxy.recorder import Exchange
from proxy.refusals import Refusal
from proxy.stops import refusal_of
from proxy.tape import Step, Tape, Where
from runtime.entries import AnswerRow, Bound, Fence, Fenced, Stopped, TapeRows
from runtime.lease import MARGIN
from runtime.step import Finality, State

log = logging.getLogger("twiceshy.attempts")
#: How many hints of one attempt are kept.
HINTS = 20
#: How many hosts' requests are counted apart, for each attempt; those of further ones are counted together.
HOSTS, OTHERS = 200, "other hosts"


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
        self.trusted_until = time.monotonic() + bound.lease_left - self._lease * MARGIN

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
        keep(self.hints, words)

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
            self.tape.ended(step, row, state)

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


def keep(hints: list[str], words: str) -> None:
    """Add *words* to *hints*, once, if there is room."""
    if words not in hints and len(hints) < HINTS:
        hints.append(words)
