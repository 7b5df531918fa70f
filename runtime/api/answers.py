"""What the API answers with."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.api.models import JsonText, Model
from runtime.step import RunStatus


class Stop(Model):
    """Why a run needs a person."""

    step: str | None
    message: str | None


class ParkedUntil(Model):
    """What a parked run waits for."""

    until: datetime | None
    events: list[str]


class RunLine(Model):
    """A run."""

    id: str
    agent: str
    status: RunStatus
    error: str | None
    attempts: int
    priority: int
    attributes: dict[str, str]
    created_at: datetime
    changed_at: datetime
    ended_at: datetime | None
    stop: Stop | None
    parked: ParkedUntil | None
    parent: str | None
    continued_from: str | None
    continued_as: str | None


class Run(RunLine):
    """A run, with what it works on and what came of it."""

    input: JsonText
    result: JsonText


class RunPage(Model):
    """Some runs, the newest first. ``next``: the cursor of the page behind."""

    runs: list[RunLine]
    next: str | None


class Result(Model):
    """What came of a run, or of the one that it was continued as: ``run`` names that."""

    run: str
    status: RunStatus
    result: JsonText
    error: str | None


class Standing(Model):
    """How a run stands after a verb."""

    run: str
    status: RunStatus
    was: RunStatus | None = None


class ForkStep(Model):
    """A step of the run that is forked. ``n``: its number."""

    n: int
    key: str
    shown: str


class Forked(Model):
    """``run``: the new one, null in a preview; what it replays, and what of the other run it has not."""

    run: str | None
    replayed: list[ForkStep]
    sent: list[ForkStep]


class Claimed(Model):
    """A new attempt, for a program that is started by whoever asked. The token is nowhere else."""

    run: str
    attempt: int
    token: str


class EventSent(Model):
    """``fresh`` false: it was sent before, under this id, with this payload."""

    name: str
    id: str
    fresh: bool


class Event(Model):
    """An event of a run. ``taken_by``: the key of the step that took it."""

    name: str
    id: str
    payload: JsonText
    at: datetime
    taken_by: str | None


class EventPage(Model):
    """Some events of a run, in the order in which they came."""

    events: list[Event]
    next: str | None


class Approval(Model):
    """What a run waits for a person to decide. ``id``: the key of the step that asks."""

    run: str
    id: str
    name: str
    request: JsonText
    asked_at: datetime
    deadline: datetime | None


class ApprovalPage(Model):
    """Some approvals that nobody has decided, the oldest first."""

    approvals: list[Approval]
    next: str | None


class Decision(Model):
    """What was decided, and by whom."""

    id: str
    name: str
    decision: Literal["approve", "decline"]
    by: str | None
    comment: str | None
    at: datetime


class JournalAnswer(Model):
    """What came of a step, once. ``own``: the sidecar's, or a person's; ``body``: its beginning, if it is text."""

    n: int
    attempt: int
    status: int
    headers: list[tuple[str, str]]
    body: str | None
    size: int
    whole: bool
    finality: str
    own: bool
    tokens: int
    recorded_at: datetime


class JournalStep(Model):
    """A step. ``n``: its number, from 1; ``attempt``: that began it; ``name``: of one that is no request."""

    key: str
    n: int
    attempt: int
    kind: str
    name: str | None
    effect: str
    state: str
    method: str
    url: str
    begun_at: datetime
    deadline: datetime | None
    evidence: str | None
    answers: list[JournalAnswer]


class JournalPage(Model):
    """Some steps of a run, in the order in which they began."""

    steps: list[JournalStep]
    next: str | None


class Timeline(BaseModel):
    """A run's tape."""

    model_config = ConfigDict(extra="allow")

    run: str
    agent: str
    status: RunStatus
    totals: dict[str, int]
    attempts: list[dict[str, Any]]
    steps: list[dict[str, Any]]


class Attempt(Model):
    """One execution of the agent's program; what it did, as its sidecar saw it."""

    n: int
    kind: str
    host: str
    sidecar: str | None
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    exit_code: int | None
    live: int
    replayed: int
    joined: int
    drift: int
    calls_saved: int
    tokens_saved: int
    hints: list[str]


class Attempts(Model):
    """The attempts of a run."""

    attempts: list[Attempt]


class Stats(Model):
    """Sums. ``runs``: by status."""

    runs: dict[str, int]
    attempts: int
    recoveries: int
    replayed: int
    joined: int
    llm_calls: int
    tokens: int
    llm_calls_saved: int
    tokens_saved: int
    money_saved: Annotated[float | None, Field(description="an estimate, at the setting `token_price`")]


class Agent(Model):
    """An agent that runs can be started of."""

    name: str
    input_schema: dict[str, Any] | None


class Agents(Model):
    """The agents that are declared."""

    agents: list[Agent]


class Health(Model):
    """The process answers, and its database does."""

    status: Literal["ok"]


class ProblemBody(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow", title="Problem")

    type: str
    title: str
    status: int
    detail: str
