"""The tape: a run as a picture in text. Pure.

The picture has a line for each step, in the order in which the steps began, and a column for each attempt:
``live`` where the attempt had the call made, ``replayed`` where it got the recorded answer, ``joined`` where
it took over what an earlier one had left in flight. A column is cut (``✂``) below the last step that its
attempt came to.

What an attempt did is known from its sidecar (``attempt.tape``, JSON) and, where the sidecar died with it,
from the steps that it began. It is information, never a decision: what cannot be read is left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from runtime.step import Effect, Finality, Kind, RunStatus, State

LIVE, REPLAYED, JOINED = "live", "replayed", "joined"
#: What passes through a sidecar as it comes, and is in no journal.
UNJOURNALLED = ("tunnel", "WebSocket")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one attempt did, as its sidecar counted it."""

    live: int = 0
    replayed: int = 0
    joined: int = 0
    drift: int = 0
    calls_saved: int = 0
    tokens_saved: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.live + other.live,
            self.replayed + other.replayed,
            self.joined + other.joined,
            self.drift + other.drift,
            self.calls_saved + other.calls_saved,
            self.tokens_saved + other.tokens_saved,
        )


@dataclass(frozen=True, slots=True)
class AttemptLine:
    """One attempt: a column. ``outcome`` None: it has not ended, as far as anybody knows."""

    n: int
    outcome: str | None = None
    exit_code: int | None = None
    counts: Counts | None = None
    parts: dict[str, str] = field(default_factory=dict)  # step key -> live, replayed, joined
    hints: tuple[str, ...] = ()  # what did not come through, and why
    unjournalled: dict[str, dict[str, int]] = field(default_factory=dict)  # host -> tunnel, WebSocket -> how many


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step: a line."""

    key: str
    attempt: int  # that began it
    effect: Effect
    state: State
    method: str
    url: str
    statuses: tuple[int, ...] = ()  # of its answers, in their order
    finality: Finality | None = None  # of the last answer
    evidence: str | None = None
    kind: Kind = Kind.HTTP
    subject: str | None = None  # the event that is waited for, the name of a local step or value
    deadline: datetime | None = None  # of a sleep or wait
    error: str | None = None  # by which a local step or a child failed

    @property
    def shown(self) -> str:
        """The step in words."""
        return f"{self.method} {self.url}" if self.kind is Kind.HTTP else f"{self.kind} {self.subject or ''}".strip()


@dataclass(frozen=True, slots=True)
class Tape:
    """A run with all that the picture shows. ``steps`` in the order in which they began."""

    run: str
    status: RunStatus
    agent: str = ""
    stop_step: str | None = None
    stop_message: str | None = None
    error: str | None = None
    wake_at: datetime | None = None  # until when a parked run waits
    wake_on: Sequence[str] = ()  # and for which events, approvals (approval:NAME), runs (run:ID)
    continued_as: str | None = None  # as whom a run that is done goes on
    attempts: Sequence[AttemptLine] = ()
    steps: Sequence[StepLine] = ()

    @property
    def counts(self) -> Counts:
        """All attempts together. Attempts that no sidecar told of count with the steps that they began."""
        return sum((self.counts_of(attempt) for attempt in self.attempts), Counts())

    def counts_of(self, attempt: AttemptLine) -> Counts:
        if attempt.counts is not None:
            return attempt.counts
        return Counts(live=sum(step.attempt == attempt.n for step in self.steps))

    def part(self, attempt: AttemptLine, step: StepLine) -> str | None:
        """What *step* was to *attempt*."""
        return attempt.parts.get(step.key) or (LIVE if step.attempt == attempt.n else None)


def read_attempt(n: int, outcome: str | None, exit_code: int | None, tape: bytes | None) -> AttemptLine:
    """An attempt's row as a column. A tape that cannot be read is none."""
    try:
        told: Any = json.loads(tape or b"null")
        if not isinstance(told, dict):
            return AttemptLine(n, outcome, exit_code)
        counts = Counts(**{name: int(told.get(name, 0)) for name in Counts.__dataclass_fields__})
        parts = {str(key): str(part) for key, part in told.get("steps", ())}
        hints = tuple(str(hint) for hint in told.get("hints", ()))
        unjournalled = {
            str(host): passed
            for host, fates in dict(told.get("arrived", ())).items()
            if (passed := {kind: int(fates[kind]) for kind in UNJOURNALLED if kind in fates})
        }
    except (ValueError, TypeError):
        return AttemptLine(n, outcome, exit_code)
    return AttemptLine(n, outcome, exit_code, counts, parts, hints, unjournalled)


# ---- the picture

_PAINT = {LIVE: "32", REPLAYED: "36", JOINED: "35", "done": "32", "cut": "31", "dim": "2", "bold": "1"}
_STATUS_PAINT = {RunStatus.DONE: "32", RunStatus.FAILED: "31", RunStatus.CANCELLED: "33", RunStatus.RUNNING: "34"}
_ENDS = {
    "done": "✔ done",
    "failed": "✂ failed",
    "died": "✂ died",
    "stopped": "■ stopped",
    "interrupted": "✂ interrupt",
    "handed_over": "↷ restart",
    "cancelled": "■ cancelled",
    "parked": "‖ parked",
    None: "…",
}
_COLUMN = 12
_STEP_LEAST, _STEP_MOST = 24, 72


def _paint(text: str, how: str | None, colour: bool) -> str:
    return f"\x1b[{how}m{text}\x1b[0m" if colour and how else text


def _shown(attempts: Sequence[AttemptLine], room: int) -> list[AttemptLine | None]:
    """At most *room* (two or more) columns: the first and the last attempts, None where some are left out."""
    if len(attempts) <= room:
        return list(attempts)
    head = max(1, (room - 1) // 3) if room > 2 else 0
    tail = room - 1 - head
    return [*attempts[:head], None, *attempts[-tail:]]


def _name(step: StepLine, width: int) -> str:
    """Method and address, the middle of a long one left out: both host and the path's end tell something."""
    if step.kind is Kind.HTTP:
        text = f"{step.method:<6} {step.url.partition('://')[2] or step.url}"
    else:
        name = step.subject or ("" if step.deadline is None else f"until {moment(step.deadline)}")
        text = f"{step.kind:<6} {name}".rstrip()
    if len(text) <= width:
        return text
    tail = (width - 8) // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def _outcome(step: StepLine) -> str:
    answers = "→".join(map(str, step.statuses[-3:]))
    if len(step.statuses) > 3:
        answers = "…→" + answers
    if step.state is State.AMBIGUOUS:
        return f"{answers} ambiguous".strip()
    if step.state is State.SENT and step.kind is not Kind.HTTP:
        if step.kind.waits and step.kind is not Kind.SLEEP and step.deadline is not None:
            return f"open until {moment(step.deadline)}"
        return "open"
    if step.state is State.SENT:
        return f"{answers} in flight".strip()
    if step.state is State.NOT_SENT:
        return f"{answers} not sent".strip()
    if step.error is not None:
        return "failed"
    return answers + (" unsure" if step.finality is Finality.DOUBTFUL else "")


def picture(tape: Tape, *, width: int = 100, colour: bool = False) -> str:
    """The run as text, no wider than *width* where that can be."""
    effects = max([len(step.effect) for step in tape.steps], default=0)
    outcomes = max([len(_outcome(step)) for step in tape.steps], default=0)
    number = len(str(len(tape.steps)))
    free = width - number - 2 - effects - 2 - outcomes - 2
    names = max([len(_name(step, _STEP_MOST)) for step in tape.steps], default=0)
    columns = _shown(tape.attempts, max(2, (free - min(names, _STEP_LEAST) - 2) // _COLUMN))
    names = max(min(names, free - 2 - len(columns) * _COLUMN), min(names, _STEP_LEAST))

    # Where each attempt's column ends: below the last step that it came to.
    ends = {
        attempt.n: max((i + 1 for i, step in enumerate(tape.steps) if tape.part(attempt, step)), default=0)
        for attempt in tape.attempts
    }

    def cell(attempt: AttemptLine | None, line: int) -> str:
        text, how = "", None
        if attempt is None:
            text, how = "…" if line < len(tape.steps) else "", _PAINT["dim"]
        elif line < len(tape.steps) and (part := tape.part(attempt, tape.steps[line])) is not None:
            text, how = part, _PAINT.get(part)
        elif line == ends[attempt.n]:
            text = _ENDS.get(attempt.outcome, attempt.outcome or "")
            if attempt.outcome is None and tape.status is RunStatus.RUNNING and attempt is tape.attempts[-1]:
                text = "▸ running"
            how = {"done": _PAINT["done"], None: _PAINT["dim"]}.get(attempt.outcome, _PAINT["cut"])
        return _paint(text, how, colour and bool(text)) + " " * (_COLUMN - len(text))

    lines = [headline(tape, colour=colour), ""]
    heads = "".join(f"{'…' if attempt is None else attempt.n!s:<{_COLUMN}}" for attempt in columns)
    lines.append(_paint(f"{'':{number}}  {'attempt':>{names}}  {heads}".rstrip(), "2", colour))
    for line in range(max([len(tape.steps), *(end + 1 for end in ends.values())], default=0)):
        cells = "".join(cell(attempt, line) for attempt in columns)
        if line < len(tape.steps):
            step = tape.steps[line]
            left = f"{line + 1:>{number}}  {_name(step, names):<{names}}  "
            right = f"{_paint(f'{step.effect:<{effects}}', '2', colour)}  {_outcome(step)}"
        else:
            left, right = " " * (number + names + 4), ""
        lines.append(f"{left}{cells}{right}".rstrip())
    return "\n".join(lines)


def headline(tape: Tape, *, colour: bool = False) -> str:
    """Run, agent, status and number of attempts in one line."""
    status = _paint(tape.status, _STATUS_PAINT.get(tape.status, "33;1" if tape.status.stopped else None), colour)
    agent = f" · {tape.agent}" if tape.agent else ""
    return f"run {_paint(tape.run, '1', colour)}{agent} · {status} · {some(len(tape.attempts), 'attempt')}"


def some(n: int, thing: str) -> str:
    """A number of things for people."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def moment(at: datetime) -> str:
    """A moment for people, in UTC, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


# ---- for programs


def as_json(tape: Tape) -> dict[str, Any]:
    """The tape as plain data, for ``--json``."""
    return {
        "run": tape.run,
        "agent": tape.agent,
        "status": str(tape.status),
        "stop": {"step": tape.stop_step, "message": tape.stop_message} if tape.status.stopped else None,
        "error": tape.error,
        "continued_as": tape.continued_as,
        "parked": {"until": _iso(tape.wake_at), "events": list(tape.wake_on)}
        if tape.status is RunStatus.PARKED
        else None,
        "totals": _counts_json(tape.counts),
        "attempts": [
            {
                "n": attempt.n,
                "outcome": attempt.outcome,
                "exit_code": attempt.exit_code,
                **_counts_json(tape.counts_of(attempt)),
                "hints": list(attempt.hints),
                "unjournalled": attempt.unjournalled,
                "steps": {step.key: part for step in tape.steps if (part := tape.part(attempt, step))},
            }
            for attempt in tape.attempts
        ],
        "steps": [
            {
                "key": step.key,
                "attempt": step.attempt,
                "effect": str(step.effect),
                "state": str(step.state),
                "method": step.method,
                "url": step.url,
                "statuses": list(step.statuses),
                "finality": None if step.finality is None else str(step.finality),
                "evidence": step.evidence,
                "kind": str(step.kind),
                "name": step.subject,
                "deadline": _iso(step.deadline),
                "error": step.error,
            }
            for step in tape.steps
        ],
    }


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _counts_json(counts: Counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in Counts.__dataclass_fields__}
