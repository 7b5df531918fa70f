"""A run walked to its end: an agent's program, the order in which things happen, faults and kills, all given.

One step of the world at a time: a request arrives, an exchange moves on, an answer is delivered, something dies.
``Walk.run`` goes on until the run is done or waits for a person who is away; what must hold on the way is
asserted on the way, what must hold at the end by ``tests.core.test_walk``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from proxy.exchange import Beat, NoAttempt, Wait
from runtime.entries import AnswerRow
from runtime.step import Effect, Finality, RunStatus, State
from tests.core.scenes import arrival
from tests.core.sidecars import Client, Exchange, Sidecar, Stage
from tests.core.world import Fault, Journal, Upstream, name_of

MOST_STEPS = 3000
MOST_ATTEMPTS = 40
#: So many attempts in a row that failed without a new step, and the run has failed (``max_attempts``).
MOST_BARREN = 10
#: Whatever the order, the oldest exchange moves at least each so many steps: an upstream answers some time.
FAIR = 7
#: After so many attempts an intent is written before the agent is started again, as it nearly always is.
KIND = 8


@dataclass(frozen=True)
class Ask:
    """A request of the program, asked up to *tries* times until its answer is final."""

    name: str
    effect: Effect
    named: bool = False  # with a Twiceshy-Step
    tries: int = 1
    fails: bool = True  # without a final answer the program fails, else it goes on
    signal: Literal["none", "count", "token"] = "none"


#: Phases one after the other; branches of a phase side by side; requests of a branch one after the other.
Program = tuple[tuple[tuple[Ask, ...], ...], ...]


class Kill(Enum):
    """What may go wrong at any moment."""

    AGENT = "the agent is killed"
    SIDECAR = "the sidecar is killed, and its agent is restarted"
    MOVED = "the agent is killed, the next attempt speaks through another sidecar"
    ISOLATED = "the sidecar is taken for dead, and goes on"
    HANG_UP = "a client gives up"
    HANG_UP_LATE = "a client gives up, its FIN is on its way"


class Person(Enum):
    """Who settles what is ambiguous."""

    WISE = "looks it up"
    BOLD = "says send_again, whatever happened"
    AWAY = "is away"


@dataclass
class Branch:
    """A branch of the program in one attempt."""

    asks: tuple[Ask, ...]
    place: str  # in the program
    at: int = 0
    tried: int = 0
    beaten: bool = False
    waits: int = -1  # for a write after this one
    client: Client | None = None

    @property
    def over(self) -> bool:
        return self.at == len(self.asks)


class Failed(Exception):
    """The program raised."""


@dataclass
class Walk:
    """The whole world."""

    program: Program
    order: list[int]
    faults: list[Fault]
    kills: list[tuple[int, Kill]]
    people: list[Person]
    journal: Journal = field(default_factory=Journal)
    upstream: Upstream = field(default_factory=Upstream)
    sidecars: list[Sidecar] = field(default_factory=list)
    sidecar: Sidecar = field(init=False)  # of the current attempt
    excused: Counter[str] = field(default_factory=Counter)  # calls that had to be made again
    bold: Counter[str] = field(default_factory=Counter)  # effects that a person had repeated
    disturbed: set[str] = field(default_factory=set)  # names that met a fault or lost a client
    final: dict[str, set[bytes]] = field(default_factory=dict)  # by place in the program: final answers given
    given: list[tuple[int, str, bytes]] = field(default_factory=list)  # attempt, name, final answer
    _told: dict[tuple[str, int], tuple[AnswerRow, int]] = field(default_factory=dict)
    _barren: int = 0
    _phase: int = 0
    _branches: list[Branch] = field(default_factory=list)
    _ghosts: list[Client] = field(default_factory=list)
    _steps: int = 0

    # ---- the loop

    def run(self) -> None:
        """Walk to the end: the run is done, or has failed, or is ambiguous and nobody there to settle it."""
        self.sidecar = self._another_sidecar()
        self._start()
        while not self._over():
            self._step()
            if self._stopped():
                self._settle()

    def _over(self) -> bool:
        return self.journal.status in (RunStatus.DONE, RunStatus.FAILED) or self._stopped()

    def _stopped(self) -> bool:
        return self.journal.status is RunStatus.AMBIGUOUS

    def _step(self) -> None:
        self._steps += 1
        assert self._steps < MOST_STEPS, "it goes on for ever"
        assert self.journal.attempt < MOST_ATTEMPTS, "it is started again for ever"
        for at, kill in self.kills:
            if at == self._steps:
                self._kill(kill)
        if self.journal.status is not RunStatus.RUNNING:
            return
        if all(branch.over for branch in self._branches) and self._phase + 1 < len(self.program):
            self._next_phase()
        moves = list(self._moves())
        if not moves:
            self._exit()
            return
        n = self.order[self._steps % len(self.order)] if self.order else 0
        move = moves[n % len(moves)]
        exchanges = [one for one in moves if isinstance(one, Exchange)]
        if exchanges and self._steps % FAIR == 0:
            move = min(exchanges, key=lambda one: one.id)
        try:
            self._move(move)
        except Failed:
            self._again("failed", self.sidecar)

    def _moves(self) -> "Iterator[Branch | Exchange | Client]":
        for branch in self._branches:
            if branch.client is not None:
                if branch.client.ready or branch.client.hopeless:
                    yield branch
            elif not branch.over and branch.waits != self.journal.writes:
                yield branch
        for sidecar in self.sidecars:
            yield from sidecar.exchanges.values()
        yield from self._ghosts

    def _move(self, what: "Branch | Exchange | Client") -> None:
        if isinstance(what, Exchange):
            fault = Fault.NONE
            if what.stage is Stage.INTENDED and self.faults:
                fault = self.faults.pop(0)
            if fault is not Fault.NONE:
                self.excused[_name(what)] += 1
                self.disturbed.add(_name(what))
            what.advance(fault)
        elif isinstance(what, Client):
            self._ghosts.remove(what)
            what.hang_up()
        elif what.client is None:
            self._ask(what)
        elif what.client.ready:
            client, what.client = what.client, None
            self._had(what, client, client.deliver())
        else:
            client, what.client = what.client, None
            client.hang_up()
            if client.exchange is None or not client.exchange.lost:
                self._tried(what)

    # ---- the agent

    def _start(self) -> None:
        self.sidecar.take(self.journal.claim(self.sidecar.id))
        self._phase = -1
        self._next_phase()

    def _next_phase(self) -> None:
        self._phase += 1
        self._branches = [Branch(asks, f"{self._phase}.{n}") for n, asks in enumerate(self.program[self._phase])]

    def _ask(self, branch: Branch) -> None:
        ask = branch.asks[branch.at]
        asked = arrival(
            ask.name, ask.effect, explicit=f"the {ask.name}" if ask.named else None,
            again=ask.signal == "count" and branch.tried > 0,
            token=f"{self.journal.attempt}/{branch.place}/{branch.at}" if ask.signal == "token" else None,
            token_is_call=True,
        )  # fmt: skip
        body = b"as in %d" % self.journal.attempt
        served = self.sidecar.ask(replace(asked, beaten=branch.beaten), body)
        if isinstance(served, Wait):  # one look at the journal, then another one whenever something was written
            served = self.sidecar.ask(replace(asked, beaten=branch.beaten), body)
        branch.waits = self.journal.writes if isinstance(served, Wait) else -1
        if isinstance(served, Client):
            branch.client, branch.beaten = served, False
        elif isinstance(served, Beat):
            branch.beaten = True
            for ghost in [one for one in self._ghosts if one.step.facts.fingerprint == asked.fingerprint]:
                self._move(ghost)
        else:
            assert not isinstance(served, NoAttempt)
            assert served is not RunStatus.DIVERGED

    def _had(self, branch: Branch, client: Client, row: AnswerRow) -> None:
        """An answer was delivered whole."""
        self._told_again(client, row)
        if row.facts.finality is not Finality.FINAL:
            self._tried(branch)
            return
        ask = branch.asks[branch.at]
        assert row.facts.body is not None
        self.final.setdefault(f"{branch.place}.{branch.at} {ask.name}", set()).add(row.facts.body)
        self.given.append((self.journal.attempt, ask.name, row.facts.body))
        branch.at, branch.tried = branch.at + 1, 0

    def _told_again(self, client: Client, row: AnswerRow) -> None:
        """What the agent acted on stays what it was: an answer only changes if nothing began after it."""
        key = client.step.key, row.n
        before = self._told.get(key)
        self._told[key] = row, self.journal.counter
        if before is None or before[0].recorded == row.recorded:
            return
        old, counter = before
        assert old.facts.finality is not Finality.FINAL, f"{key}: a final answer was replaced"
        _, _, barren, decided = next(one for one in self.journal.replaced if one[:2] == key and one[3] >= counter)
        acted = [
            other.facts.key
            for other in self.journal.rows.values()
            if other.facts.effect is not Effect.READ and counter < other.begun <= decided
        ]
        doubted = old.facts.finality is Finality.DOUBTFUL
        assert barren or doubted or not acted, f"{key} was asked again, though {acted} began after it"

    def _tried(self, branch: Branch) -> None:
        ask = branch.asks[branch.at]
        branch.tried += 1
        branch.beaten = False
        if branch.tried >= ask.tries:
            if ask.fails:
                raise Failed
            branch.at, branch.tried = branch.at + 1, 0

    def _exit(self) -> None:
        """Nothing moves any more: the program has ended, and so has every exchange."""
        stuck = [branch.place for branch in self._branches if not branch.over]
        assert not stuck, f"branches {stuck} wait for nothing"
        # What nobody heard, and is not final, is no end (DESIGN §6).
        unheard = [
            step.key for step in self.sidecar.tape.steps.values()
            if step.claimed and step.last is not None and step.had < len(step.answers)
            and step.last.facts.finality is not Finality.FINAL
        ]  # fmt: skip
        if unheard:
            self._again("failed", self.sidecar)
        else:
            self._end("done")

    def _again(self, outcome: str, sidecar: Sidecar) -> None:
        """The attempt ended; the next one speaks through *sidecar*."""
        self._end(outcome)
        self.sidecar = sidecar
        if self.journal.status is RunStatus.QUEUED:
            self._start()

    def _end(self, outcome: str) -> None:
        for client in [*self._ghosts, *(branch.client for branch in self._branches if branch.client)]:
            self._leave(client)
        self._ghosts.clear()
        self._branches = []
        if self.journal.attempt > KIND:
            for exchange in list(self.sidecar.exchanges.values()):
                if exchange.stage is Stage.DECIDED:
                    exchange.advance()
        self.journal.end_attempt(outcome)
        self._barren = self._barren + 1 if self.journal.failed_barren else 0
        if self._barren >= MOST_BARREN and self.journal.status is RunStatus.QUEUED:
            self.journal.status = RunStatus.FAILED

    def _leave(self, client: Client) -> None:
        """The agent's end is gone. A read is cancelled with it, and will be made again."""
        if client.exchange is not None and client.exchange.tries and client.step.effect is Effect.READ:
            self.excused[_name(client.exchange)] += 1
        client.hang_up()

    # ---- what goes wrong

    def _another_sidecar(self) -> Sidecar:
        self.sidecars.append(Sidecar(f"sidecar {len(self.sidecars)}", self.journal, self.upstream))
        return self.sidecars[-1]

    def _kill(self, kill: Kill) -> None:
        if kill in (Kill.HANG_UP, Kill.HANG_UP_LATE):
            self._hang_up(late=kill is Kill.HANG_UP_LATE)
            return
        old = self.sidecar
        if kill in (Kill.SIDECAR, Kill.ISOLATED):
            self.journal.dead.add(old.id)
            self.journal.writes += 1
            for exchange in old.exchanges.values():
                if exchange.tries:
                    self.excused[_name(exchange)] += 1
        if kill is Kill.SIDECAR:
            old.die()
        old.believed = old.believed and kill is not Kill.ISOLATED
        outcome = "handed_over" if kill is Kill.SIDECAR else "died"
        self._again(outcome, old if kill is Kill.AGENT else self._another_sidecar())

    def _hang_up(self, *, late: bool) -> None:
        waiting = [(one, one.client) for one in self._branches if one.client is not None]
        if not waiting:
            return
        branch, client = waiting[self._steps % len(waiting)]
        branch.client = None
        self.disturbed.add(name_of(client.step.facts.fingerprint))
        if late and client.step.effect.is_effect:
            self._ghosts.append(client)
        else:
            self._leave(client)
        try:
            self._tried(branch)
        except Failed:
            self._again("failed", self.sidecar)

    # ---- a person

    def _settle(self) -> None:
        """The run is stopped; its agent is ended."""
        if self.journal.token is not None:
            self._end("stopped")
        while self.journal.status is RunStatus.AMBIGUOUS:
            key = self.journal.stop_step
            assert key is not None
            assert self.journal.rows[key].state is State.AMBIGUOUS
            person = self.people.pop(0) if self.people else Person.WISE
            if person is Person.AWAY:
                return
            facts = self.journal.rows[key].facts
            done = facts.wire_key is not None and self.upstream.under[facts.wire_key] > 0
            if person is Person.BOLD and done:
                self.bold[name_of(facts.fingerprint)] += 1
            again = person is Person.BOLD or not done
            self.journal.resolve(key, "send_again" if again else "assume_done")
        if self.journal.status is RunStatus.QUEUED:
            self._start()


def _name(exchange: Exchange) -> str:
    return name_of(exchange.step.facts.fingerprint)
