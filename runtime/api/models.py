"""What goes in and out, as pydantic models: they check, and the OpenAPI document is made from them.

``JsonText`` is JSON that is kept as it was written; of a body, the text of such a member is in ``Body.raw``.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema

from runtime import attributes
from runtime.queue import KEY_MAX, PRIORITY_MAX
from runtime.step import RunStatus


class AtMost:
    """Of a number: no larger than the setting of this name."""

    def __init__(self, setting: str) -> None:
        self.setting = setting


def _utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("no moment that a clock shows") from error


_NAME = r"^[A-Za-z0-9._~-]{1,200}$"
RunId = Annotated[str, Field(pattern=_NAME, description="id of a run")]
Name = Annotated[str, Field(pattern=_NAME)]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$", description="name of an agent")]
StepKey = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9._~:/@+=,-]{1,200}$", description="key of a step, as the journal has it")
]
Moment = Annotated[AwareDatetime, AfterValidator(_utc)]
#: In an answer.
JsonText = Annotated[Any, WithJsonSchema({"description": "any JSON, as it was written"})]
Attributes = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$")],
        Annotated[str, Field(max_length=attributes.VALUE_MAX)],
    ],
    Field(max_length=attributes.COUNT_MAX, description="what the run is to be found by: names and printable values"),
]
Statuses = Annotated[RunStatus, Field(description="how the run stands")]


class Model(BaseModel):
    """Unknown members are an error, on the way in; what goes out is trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Body(Model):
    """Of a request. ``raw``: the text of each member, as it was written."""

    _raw: Mapping[str, bytes] = PrivateAttr(default_factory=dict)

    def raw(self, name: str) -> bytes | None:
        """The text of the member *name*; None: it is not there."""
        return self._raw.get(name)


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
    cursor: Annotated[str | None, Field(description="`next` of the page before")] = None


class RunFilters(Paging):
    """Query."""

    status: Statuses | None = None
    agent: AgentName | None = None
    attribute: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}:")]],
        Field(max_length=attributes.COUNT_MAX, description="NAME:VALUE; several: all of them"),
    ] = []
    created_after: Annotated[Moment | None, Field(description="created then or later")] = None
    created_before: Annotated[Moment | None, Field(description="created before that")] = None


class Waiting(Model):
    """Query."""

    timeout: Annotated[
        float, Field(ge=0, description="seconds to wait for the end; longer than the setting `api_wait_max`: so long")
    ] = 0.0


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


class StartRun(Body):
    """A run to be started."""

    agent: AgentName
    input: JsonText = None
    run: RunId | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX, strict=True)] = 0
    attributes: Attributes = {}


class SendEvent(Body):
    """An event, which one wait for its name takes."""

    name: Name
    id: Annotated[Name | None, Field(description="one that was sent before sends nothing")] = None
    payload: JsonText = None


class Resolve(Body):
    """What happened at a step whose outcome is not known."""

    how: Annotated[
        Literal["assume_done", "send_again"],
        Field(description="`assume_done`: it happened, and the agent gets the answer given here; `send_again`: not"),
    ]
    status: Annotated[int | None, Field(ge=200, le=599, strict=True, description="of the answer")] = None
    headers: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}$")],
            Annotated[str, Field(pattern=r"^[\t -~]{0,8000}$")],
        ],
        Field(max_length=100, description="of the answer"),
    ] = {}
    body: Annotated[
        JsonText, Field(description="of the answer: a string is the text itself, all else JSON as it is written")
    ] = None


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
