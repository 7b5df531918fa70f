"""What is written to the journal and what is read from it, as values. Pure.

An *entry* is one state change of one step (``runtime.step``); ``runtime.journal`` writes entries of all
runs in group commits. Each is answered by one outcome; a fenced, conflicting or poisoned entry fails
alone.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from uuid import UUID

from runtime.step import Effect, Finality, Kind, RunStatus, State

Headers = tuple[tuple[bytes, bytes], ...]
#: What a person may say of an approval.
Verdict = Literal["approve", "decline"]


@dataclass(frozen=True, slots=True)
class Fence:
    """The right to write: checked against the run's row in the transaction that writes."""

    run_id: str
    token_hash: bytes
    sidecar: str


@dataclass(frozen=True, slots=True)
class Own:
    """What a step of the sidecar's own is. Its deadline is ``until``, or ``seconds`` from its first record."""

    kind: Kind
    subject: str | None = None  # the event that is waited for, the name of a local step or value
    seconds: float | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step is, from its first request on. ``request_*`` hold no credentials."""

    key: str
    effect: Effect
    explicit: bool
    fingerprint: bytes  # 32 bytes
    occurrence: int  # from 1; 0 for explicit keys
    secondary: bytes  # 16 bytes
    method: str
    url: str  # for people: secrets out
    wire_key: str | None  # the idempotency key on the wire, None where there is none
    request_head: bytes  # JSON, see proxy.message
    request_body: bytes
    rules: bytes  # hash of the rules it was printed under
    own: Own | None = None  # None: an HTTP exchange

    @property
    def kind(self) -> Kind:
        return Kind.HTTP if self.own is None else self.own.kind

    @property
    def shown(self) -> str:
        """The step for people, in a few words."""
        return f"{self.method} {self.url}" if self.own is None else f"{self.kind} {self.own.subject or ''}".strip()


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """One answer as it goes into the list."""

    status: int
    reason: bytes
    headers: Headers
    body: bytes | None  # None: it stands in pieces under body_id
    body_id: UUID | None
    size: int
    whole: bool
    finality: Finality
    own: bool = False
    tokens: int = 0


# ---- entries


@dataclass(frozen=True, slots=True)
class Intent:
    """Step -> sent, before the first byte. ``replaces``: the dead exchange whose place is taken.

    With ``replaces=None`` the row must be absent, answered or not_sent (an existing row keeps its facts:
    class, wire key, first bytes; only exchange, sidecar, place, attempt-independent times change).
    """

    fence: Fence
    facts: StepFacts
    exchange: UUID
    place: int  # index in the list of answers that this exchange's answer takes
    replaces: UUID | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Step sent -> answered by its exchange. Guarded by the exchange id, not by the lease."""

    run_id: str
    key: str
    exchange: UUID
    attempt: int
    facts: AnswerFacts
    #: What the step becomes: ANSWERED, or NOT_SENT when this is an answer of our own and no byte had left.
    state: State = State.ANSWERED
    #: The id of the event that the step, a wait, takes with this answer. Taken before by another: Conflict.
    event: str | None = None
    #: The step, an approval, was not decided in time. Decided before: Conflict.
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class PutBack:
    """Step sent -> not_sent, without an answer: certainly no byte left (and nobody was told anything)."""

    run_id: str
    key: str
    exchange: UUID


@dataclass(frozen=True, slots=True)
class Stop:
    """The run stops (424, 412, 403) in the transaction that decides it.

    With ``exchange`` the step goes sent -> ambiguous (only if the row still names that exchange).
    """

    fence: Fence
    status: RunStatus
    step: str
    message: str
    exchange: UUID | None = None
    evidence: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A read and its answer at once, written when it ended. Fenced: nothing is recorded. First record wins."""

    fence: Fence
    facts: StepFacts
    exchange: UUID
    answer: AnswerFacts
    place: int
    attempt: int


Entry = Intent | Answer | PutBack | Stop | Read

# ---- outcomes


@dataclass(frozen=True, slots=True)
class Begun:
    """Intent: committed; the first byte may leave."""

    begun: int
    first_sent_at: datetime
    now: datetime


@dataclass(frozen=True, slots=True)
class Recorded:
    """Answer, Read: committed as answer ``n`` with this ``recorded`` counter. PutBack, Stop: committed (0)."""

    recorded: int
    begun: int = 0


@dataclass(frozen=True, slots=True)
class Fenced:
    """The token is not the run's current one, or the attempt lives with another sidecar.

    ``sidecar``: the other sidecar's id in the second case, else None.
    """

    sidecar: str | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run is not running: stopped (with step and message), ended (perhaps to go on as another) or queued."""

    status: RunStatus
    step: str | None
    message: str | None
    continued_as: str | None = None


@dataclass(frozen=True, slots=True)
class Conflict:
    """The row is not as the entry supposes: taken over, answered first by another, or present already."""


@dataclass(frozen=True, slots=True)
class Bound:
    """bind, renew: the attempt is the run's current one and lives with this sidecar. ``lease_left`` in seconds."""

    n: int
    uuid: UUID
    lease_left: float


Outcome = Begun | Recorded | Fenced | Stopped | Conflict


# ---- what is read


@dataclass(slots=True)
class AnswerRow:
    """An answer in the index; ``body`` only when small (see settings.index_body), else fetched when needed."""

    n: int
    recorded: int
    attempt: int
    facts: AnswerFacts


@dataclass(slots=True)
class StepRow:
    facts: StepFacts
    begun: int
    attempt: int
    state: State
    exchange: UUID | None
    sidecar: str | None
    sidecar_dead: bool  # the sidecar that has the exchange is known dead (ended, or lease over)
    place: int
    first_sent_at: datetime
    answers: list[AnswerRow] = field(default_factory=list)
    tries: int = 1  # of a local step: how many permits were given
    #: False: ``facts.request_body`` is large, was left in the database, and b"" stands for it. Never so for a
    #: step that may be sent again.
    request_loaded: bool = True


@dataclass(slots=True)
class TapeRows:
    """A run as its sidecar needs it, read in one snapshot."""

    run_id: str
    uuid: UUID
    attempt: int  # current attempt's number
    token_hash: bytes | None
    status: RunStatus
    stop_step: str | None
    stop_message: str | None
    sidecar: str | None  # of the current attempt
    lease_left: float  # seconds by the database's clock, negative when over
    #: The previous attempt failed without a new step: provisional last answers are asked again.
    last_failed_barren: bool
    now: datetime
    steps: list[StepRow] = field(default_factory=list)
    owned: bool = False  # somebody has the attempt's process, and starts the next one: it may park
    agent: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits: its ``deadline`` (None: none), the seconds ``left`` to it, and what it waited for, if here."""

    deadline: datetime | None
    left: float | None
    came: "Event | Decision | ChildEnd | None"


@dataclass(frozen=True, slots=True)
class Event:
    """A message to a run. ``payload``: JSON as it was sent."""

    id: str
    payload: bytes
    at: datetime


@dataclass(frozen=True, slots=True)
class Decision:
    """What a person said of an approval. ``id``: the key of the step that asked."""

    id: str
    name: str
    decision: Verdict
    by: str | None
    comment: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child run ended. ``result``: JSON as it was put; None: it put none."""

    status: RunStatus
    result: bytes | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Parked:
    """The attempt gave its place up. ``until`` None: until an event comes."""

    until: datetime | None
