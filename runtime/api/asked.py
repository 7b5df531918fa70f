"""What is asked of the API: paths, queries, headers, bodies."""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from runtime import attributes, names
from runtime.api.models import (
    NO_OTHERS,
    TEXT,
    WHOLE,
    AgentName,
    AtMost,
    Attributes,
    JsonText,
    Model,
    Moment,
    Name,
    RunId,
    Statuses,
    StepKey,
)
from runtime.approvals import BY_MAX, COMMENT_MAX
from runtime.queue import KEY_MAX, PRIORITY_MAX


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
    ] = Field(default_factory=list)
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
        str,
        Field(pattern=rf"^{names.STEP_KEY.pattern}$", description="its id (# as %23), or its name if that is enough"),
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
    attributes: Attributes = Field(default_factory=dict)


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
        Field(max_length=100, json_schema_extra=NO_OTHERS),
    ] = Field(default_factory=dict)
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
    by: Annotated[str | None, Field(max_length=BY_MAX, pattern=TEXT, description="who says so")] = None
    comment: Annotated[str | None, Field(max_length=COMMENT_MAX, pattern=TEXT)] = None
