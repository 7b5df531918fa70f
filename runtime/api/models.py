"""What goes in and out, as pydantic models: they check, and the OpenAPI document is made from them.

``JsonText`` is JSON that is kept as it was written; of a body, the text of such a member is in ``Call.raw``.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    WithJsonSchema,
)

from runtime import attributes
from runtime.approvals import BY_MAX, COMMENT_MAX
from runtime.queue import KEY_MAX, PRIORITY_MAX
from runtime.step import RunStatus


class AtMost:
    """Of a number: no larger than the setting of this name."""

    def __init__(self, setting: str) -> None:
        self.setting = setting


def _whole(given: Any) -> Any:
    """JSON has one kind of number, and ``5.0`` is a whole one; ``true`` and ``"5"`` are none."""
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, bool | str):
        raise ValueError("a whole number")
    return given


def _written(given: Any) -> Any:
    """A moment is written down, and is no number of seconds."""
    if not isinstance(given, str) or not re.match(r"\d{4}-\d\d-\d\d[Tt ]", given):
        raise ValueError("a moment as RFC 3339 has it: 2026-01-31T09:00:00Z")
    return given


def _utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("no moment that a clock shows") from error


_NAME = r"^[A-Za-z0-9._~-]{1,200}$"
#: Of an object whose names have a pattern.
_NO_OTHERS: dict[str, Any] = {"additionalProperties": False}
#: What a database takes as text.
_TEXT = r"^[^\x00]*$"
RunId = Annotated[str, Field(pattern=_NAME, description="id of a run")]
Name = Annotated[str, Field(pattern=_NAME)]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$", description="name of an agent")]
StepKey = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9._~:/@+=,-]{1,200}$", description="key of a step, as the journal has it")
]
Moment = Annotated[AwareDatetime, BeforeValidator(_written), AfterValidator(_utc)]
WHOLE = BeforeValidator(_whole)
#: In an answer.
JsonText = Annotated[Any, WithJsonSchema({"description": "any JSON, as it was written"})]
Attributes = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$")],
        Annotated[str, Field(pattern=rf"^{attributes.VALUE.pattern}$")],
    ],
    Field(
        max_length=attributes.COUNT_MAX,
        description="what the run is to be found by: names and values",
        json_schema_extra=_NO_OTHERS,
    ),
]
Statuses = Annotated[RunStatus, Field(description="how the run stands")]


class Model(BaseModel):
    """Unknown members are an error, on the way in; what goes out is trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---- what is asked for


class OfRun(Model):
    """Path."""

    run: RunId


class OfStep(OfRun):
    """Path."""

    step: StepKey


class Paging(Model):
    """Query."""

    limit: Annotated[int, Field(ge=1, description="how many at most"), AtMost("api_page_max")] = 50
    cursor: Annotated[str | None, Field(pattern=r"^[0-9]{1,18}$", description="`next` of the page before")] = None


class RunFilters(Paging):
    """Query."""

    cursor: Annotated[
        str | None, Field(pattern=r"^[0-9]{1,17}\.([2-7][0-9a-f]){1,200}$", description="`next` of the page before")
    ] = None
    status: Statuses | None = None
    agent: AgentName | None = None
    attribute: Annotated[
        list[Annotated[str, Field(pattern=rf"^[A-Za-z0-9._~-]{{1,100}}:{attributes.VALUE.pattern}$")]],
        Field(max_length=attributes.COUNT_MAX, description="NAME:VALUE; several: all of them"),
    ] = []
    created_after: Annotated[Moment | None, Field(description="created then or later")] = None
    created_before: Annotated[Moment | None, Field(description="created before that")] = None


class Waiting(Model):
    """Query."""

    timeout: Annotated[
        float, Field(ge=0, description="seconds to wait for the end; longer than the setting `api_wait_max`: so long")
    ] = 0.0


class ApprovalFilters(Paging):
    """Query."""

    cursor: Annotated[
        str | None,
        Field(pattern=r"^[0-9]{1,17}(\.([2-7][0-9a-f]){1,200}){2}$", description="`next` of the page before"),
    ] = None
    run: RunId | None = None
    name: Name | None = None


class OfApproval(OfRun):
    """Path."""

    approval: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9._~:/@+=,-]{1,200}$", description="its id, or its name while that is enough")
    ]


class Since(Model):
    """Query."""

    since: Annotated[Moment | None, Field(description="of what began then or later; of all without it")] = None


class IdempotencyKey(Model):
    """Header."""

    idempotency_key: Annotated[
        str | None,
        Field(
            alias="Idempotency-Key", min_length=1, max_length=KEY_MAX, pattern=r"^[!-~]([ -~]*[!-~])?$",
            description="equal starts with an equal key are one run; the key outlives it",
        ),
    ] = None  # fmt: skip


class LastEventId(Model):
    """Header."""

    last_event_id: Annotated[
        str | None,
        Field(alias="Last-Event-ID", pattern=r"^[0-9]{0,18}$", description="the `id` that was seen last"),
    ] = None


class StartRun(Model):
    """A run to be started."""

    agent: AgentName
    input: JsonText = None
    run: RunId | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX), WHOLE] = 0
    attributes: Attributes = {}


class SendEvent(Model):
    """An event, which one wait for its name takes."""

    name: Name
    id: Annotated[Name | None, Field(description="one that was sent before sends nothing")] = None
    payload: JsonText = None


class AssumeDone(Model):
    """It happened, and the agent gets the answer given here; what is left out, the rule of the request says."""

    how: Literal["assume_done"]
    status: Annotated[
        Annotated[int, Field(ge=200, le=599), WHOLE] | None, Field(description="200 where it is left out")
    ] = None
    headers: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}$")],
            Annotated[str, Field(pattern=r"^[\t -~]{0,8000}$")],
        ],
        Field(max_length=100, json_schema_extra=_NO_OTHERS),
    ] = {}
    body: Annotated[JsonText, Field(description="a string is the text itself, all else JSON as it is written")] = None


class SendAgain(Model):
    """It did not happen: it is sent when the next attempt asks for it."""

    how: Literal["send_again"]


class Resolve(RootModel[Annotated[AssumeDone | SendAgain, Field(discriminator="how")]]):
    """What happened at a step whose outcome is not known."""


class ForkRun(Model):
    """Where to fork a run."""

    before: Annotated[
        int, Field(ge=1, le=10**9, description="number of the first step that is done anew, from 1"), WHOLE
    ]
    run: Annotated[RunId | None, Field(description="id of the new run")] = None
    preview: Annotated[bool, Field(strict=True, description="only say what would be")] = False


class Decide(Model):
    """A person's word."""

    decision: Literal["approve", "decline"]
    by: Annotated[str | None, Field(max_length=BY_MAX, pattern=_TEXT, description="who says so")] = None
    comment: Annotated[str | None, Field(max_length=COMMENT_MAX, pattern=_TEXT)] = None


# ---- what is answered


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
