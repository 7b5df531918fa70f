"""What the models of what is asked and answered are made of: they check, and the OpenAPI document is made from them.

``JsonText`` is JSON that is kept as it was written; of a body, the text of such a member is in ``Call.raw``.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from runtime import attributes, names
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
NO_OTHERS: dict[str, Any] = {"additionalProperties": False}
#: What a database takes as text.
TEXT = r"^[^\x00]*$"
RunId = Annotated[str, Field(pattern=_NAME, description="id of a run")]
Name = Annotated[str, Field(pattern=_NAME)]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$", description="name of an agent")]
StepKey = Annotated[
    str, Field(pattern=rf"^{names.STEP_KEY.pattern}$", description="key of a step, as the journal has it; # as %23")
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
        json_schema_extra=NO_OTHERS,
    ),
]
Statuses = Annotated[RunStatus, Field(description="how the run stands")]


class Model(BaseModel):
    """Unknown members are an error, on the way in; what goes out is trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
