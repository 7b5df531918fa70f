"""What surrounds the pure heart, in memory: a journal and an upstream that count.

The journal takes and gives ``runtime.entries`` values and answers them as ``002_write.sql`` does. Its states
move by ``runtime.step.TRANSITIONS`` alone, so an entry that the table does not know is a KeyError. The
upstream is honest: an equal key is one effect, and an equal key with other bytes is an error.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from uuid import UUID

from runtime.entries import (
    Answer,
    AnswerFacts,
    AnswerRow,
    Begun,
    Conflict,
    Entry,
    Fence,
    Fenced,
    Intent,
    Outcome,
    PutBack,
    Read,
    Recorded,
    StepRow,
    Stop,
    Stopped,
    TapeRows,
)
from runtime.step import TRANSITIONS, Effect, Event, Finality, RunStatus, State

RUN = "r"
DAY = 86400.0


def print_of(name: str) -> bytes:
    """A fingerprint that can be read."""
    return name.encode().ljust(32, b".")


def name_of(fingerprint: bytes) -> str:
    return fingerprint.rstrip(b".").decode()


def facts_of(status: int, body: bytes, finality: Finality, *, own: bool = False, whole: bool = True) -> AnswerFacts:
    return AnswerFacts(status, b"", (), body, None, len(body), whole, finality, own)


@dataclass
class Journal:
    """One run's rows. ``dead``: sidecars that are known or judged dead."""

    rows: dict[str, StepRow] = field(default_factory=dict)
    status: RunStatus = RunStatus.QUEUED
    stop_step: str | None = None
    attempt: int = 0
    token: bytes | None = None
    owner: str | None = None
    counter: int = 0
    newest: int = 0
    newest_at_claim: int = 0
    failed_barren: bool = False
    now: float = 1_000_000.0
    dead: set[str] = field(default_factory=set)
    writes: int = 0
    #: Answers that are asked for anew: step, place, whether the attempt before failed barren, counter then.
    replaced: list[tuple[str, int, bool, int]] = field(default_factory=list)
    _brought: dict[UUID, AnswerRow] = field(default_factory=dict)

    # ---- attempts

    def claim(self, sidecar: str) -> Fence:
        """A new attempt, which lives with *sidecar*; the one before is fenced."""
        assert self.status in (RunStatus.QUEUED, RunStatus.RUNNING)
        self.status = RunStatus.RUNNING
        self.attempt += 1
        self.token = b"%d" % self.attempt
        self.owner = sidecar
        self.newest_at_claim = self.newest
        return Fence(RUN, self.token, sidecar)

    def end_attempt(self, outcome: str) -> None:
        """DESIGN §3.8: an answer that leaves an effect open becomes a question when the attempt fails after it."""
        self.token = self.owner = None
        self.failed_barren = outcome == "failed" and self.newest == self.newest_at_claim
        if self.status is not RunStatus.RUNNING:
            return
        self.status = RunStatus.DONE if outcome == "done" else RunStatus.QUEUED
        if outcome in ("failed", "died"):
            for key, row in self.rows.items():
                if row.state is State.ANSWERED and row.answers[-1].facts.finality is Finality.DOUBTFUL:
                    self._move(row, Event.DOUBTED)
                    self.status, self.stop_step = RunStatus.AMBIGUOUS, key

    def resolve(self, key: str, how: str) -> None:
        """A person settles an ambiguous step."""
        row = self.rows[key]
        assert row.state is State.AMBIGUOUS
        if how == "send_again":
            self._move(row, Event.SEND_AGAIN)
        else:
            self._move(row, Event.ASSUME_DONE)
            last = row.answers[-1] if row.answers else None
            if last is not None and last.facts.finality is Finality.DOUBTFUL:
                last.facts = replace(last.facts, finality=Finality.FINAL)
            else:
                self._append(row, row.place, self.attempt, facts_of(200, b"a person's", Finality.FINAL, own=True))
        self._settled()

    def load(self) -> TapeRows:
        """A snapshot: what is written later does not show in it."""
        return TapeRows(
            RUN, UUID(int=1), self.attempt, self.token, self.status, self.stop_step, None, self.owner, 30.0,
            self.failed_barren, datetime.fromtimestamp(self.now, UTC),
            [
                replace(row, sidecar_dead=row.sidecar in self.dead, answers=[replace(one) for one in row.answers])
                for row in self.rows.values()
            ],
        )  # fmt: skip

    # ---- entries

    def write(self, entry: Entry) -> Outcome:
        """Take one entry."""
        self.writes += 1
        match entry:
            case Answer():
                return self._answer(entry)
            case PutBack():
                row = self.rows[entry.key]
                if row.exchange != entry.exchange or row.state is not State.SENT:
                    return Conflict()
                self._move(row, Event.NOTHING_LEFT)
                return Recorded(0)
            case Stop():
                return self._stop(entry)
            case Intent():
                return self._fenced(entry.fence) or self._intent(entry)
            case Read():
                return self._fenced(entry.fence) or self._read(entry)

    def _fenced(self, fence: Fence) -> Fenced | Stopped | None:
        if self.token is None or self.token != fence.token_hash:
            return Fenced()
        if self.status is not RunStatus.RUNNING:
            return Stopped(self.status, self.stop_step, "")
        return None if self.owner == fence.sidecar else Fenced(self.owner)

    def _intent(self, entry: Intent) -> Outcome:
        row = self.rows.get(entry.facts.key)
        now = datetime.fromtimestamp(self.now, UTC)
        if row is None:
            if entry.place or entry.replaces is not None:
                return Conflict()
            self.counter = self.newest = self.counter + 1
            self.rows[entry.facts.key] = StepRow(
                entry.facts, self.counter, self.attempt, TRANSITIONS[None, Event.INTENT], entry.exchange,
                entry.fence.sidecar, False, 0, now,
            )  # fmt: skip
            return Begun(self.counter, now, now)
        last = row.answers[-1] if row.answers else None
        if entry.replaces is not None:
            if row.state is not State.SENT or row.exchange != entry.replaces:
                return Conflict()
            if row.sidecar != entry.fence.sidecar and row.sidecar not in self.dead:
                return Conflict()
            self._move(row, Event.TAKE_OVER)
        elif (row.state is State.NOT_SENT and entry.place <= len(row.answers)) or (
            row.state is State.ANSWERED
            and last is not None
            and last.facts.finality is Finality.PROVISIONAL
            and entry.place in (last.n, last.n + 1)
        ):
            self._move(row, Event.INTENT)
        else:
            return Conflict()
        row.exchange, row.sidecar, row.place = entry.exchange, entry.fence.sidecar, entry.place
        return Begun(row.begun, row.first_sent_at, now)

    def _answer(self, entry: Answer) -> Outcome:
        row = self.rows[entry.key]
        mine = row.exchange == entry.exchange
        if mine and row.state is State.SENT:
            self._move(row, Event.ANSWER if entry.state is State.ANSWERED else Event.NOTHING_LEFT)
        elif entry.exchange in self._brought:
            return Recorded(self._brought[entry.exchange].recorded, row.begun)
        elif (mine and row.state in (State.AMBIGUOUS, State.NOT_SENT)) or (
            row.facts.effect is not Effect.AT_MOST_ONCE and row.state is State.AMBIGUOUS
        ):
            if entry.state is State.ANSWERED:
                self._move(row, Event.ASSUME_DONE)
            elif row.state is State.AMBIGUOUS:
                self._move(row, Event.SEND_AGAIN)
            self._settled()
        else:
            return Conflict()
        brought = self._append(row, row.place, entry.attempt, entry.facts)
        self._brought[entry.exchange] = brought
        return Recorded(brought.recorded, row.begun)

    def _read(self, entry: Read) -> Outcome:
        row = self.rows.get(entry.facts.key)
        if row is None:
            self.counter = self.newest = self.counter + 1
            row = StepRow(
                entry.facts, self.counter, self.attempt, TRANSITIONS[None, Event.READ_RECORDED], entry.exchange,
                entry.fence.sidecar, False, 0, datetime.fromtimestamp(self.now, UTC),
            )  # fmt: skip
            self.rows[entry.facts.key] = row
        else:
            last = row.answers[-1]
            anew = last.facts.finality is Finality.PROVISIONAL and last.attempt < entry.attempt
            if entry.place != last.n + 1 and not (entry.place == last.n and anew):
                return Conflict()
            self._move(row, Event.READ_RECORDED)
        return Recorded(self._append(row, entry.place, entry.attempt, entry.answer).recorded, row.begun)

    def _stop(self, entry: Stop) -> Outcome:
        refused = self._fenced(entry.fence)
        row = self.rows[entry.step]
        lost = (
            entry.exchange is not None
            and row.exchange == entry.exchange
            and row.state is State.SENT
            and (refused is None or row.sidecar == entry.fence.sidecar)
        )
        if lost:
            self._move(row, Event.LOST)
        if refused is not None:
            return refused
        if not lost and entry.exchange is not None:
            return Conflict()
        self.status, self.stop_step = entry.status, entry.step
        return Recorded(0)

    def _append(self, row: StepRow, place: int, attempt: int, facts: AnswerFacts) -> AnswerRow:
        assert len(row.answers) - 1 <= place <= len(row.answers), "a list of answers without gaps"
        self.counter += 1
        row.answers[place:] = [AnswerRow(place, self.counter, attempt, facts)]
        return row.answers[place]

    def _settled(self) -> None:
        if self.status is RunStatus.AMBIGUOUS:
            open_ = [key for key, row in self.rows.items() if row.state is State.AMBIGUOUS]
            self.stop_step = open_[0] if open_ else None
            self.status = RunStatus.AMBIGUOUS if open_ else RunStatus.QUEUED

    @staticmethod
    def _move(row: StepRow, event: Event) -> None:
        row.state = TRANSITIONS[row.state, event]


# ---- the upstream


class Fault(Enum):
    """What may happen to one sending."""

    NONE = "answered with 200"
    REFUSED = "not a byte of it was sent"
    BUSY = "503, nothing was done"
    FAILED = "503, and it was done"
    LIMITED = "429"
    DROPPED = "the connection was lost before it was done"
    LOST = "the connection was lost after it was done"
    SILENT = "done, and no answer came in time"
    CUT = "done, and the answer was cut"


@dataclass(frozen=True)
class Reply:
    """``status`` None: no whole answer, because of ``fault``."""

    status: int | None
    body: bytes
    fault: Fault


@dataclass
class Upstream:
    """Counts what it receives and what it does."""

    calls: Counter[str] = field(default_factory=Counter)  # by name
    made: list[str] = field(default_factory=list)  # name of each effect, LLM call, read; its place is its id
    under: Counter[str] = field(default_factory=Counter)  # by key: how often something was done under it
    keys: dict[str, int] = field(default_factory=dict)  # key -> id of what was done under it
    bodies: dict[str, bytes] = field(default_factory=dict)  # key -> the bytes that it came with

    def take(self, name: str, effect: Effect, key: str | None, body: bytes, fault: Fault) -> Reply:
        """A request arrives (or does not)."""
        if fault is Fault.REFUSED:
            return Reply(None, b"", fault)
        self.calls[name] += 1
        if key is not None:
            first = self.bodies.setdefault(key, body)
            assert first == body, f"{name}: the key {key} came with other bytes: {first!r}, then {body!r}"
        ident = -1
        if fault not in (Fault.BUSY, Fault.LIMITED, Fault.DROPPED):
            ident = self._do(name, effect, key)
        if fault in (Fault.DROPPED, Fault.LOST, Fault.SILENT, Fault.CUT):
            return Reply(None, b"", fault)
        status = {Fault.NONE: 200, Fault.LIMITED: 429}.get(fault, 503)
        return Reply(status, b"%s %d" % (name.encode(), ident) if status == 200 else b"", fault)

    def _do(self, name: str, effect: Effect, key: str | None) -> int:
        if effect is Effect.IDEMPOTENT and key is not None:
            if key in self.keys:
                return self.keys[key]
            self.keys[key] = len(self.made)
        self.made.append(name)
        if key is not None:
            self.under[key] += 1
        return len(self.made) - 1

    def done(self, name: str) -> int:
        """How often *name* was done."""
        return self.made.count(name)
