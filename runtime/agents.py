"""Agents that workers run, as ``[agents.NAME]`` in ``twiceshy.toml`` declares them. Pure.

Paths in a table are absolute by the time it comes here (``runtime.settings``), and a schema is read.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from runtime import payload
from runtime.errors import UsageError

#: How much of what does not fit is shown, in characters.
SHOWN = 300

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,100}$")]
Module = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]


class AgentTable(BaseModel):
    """One agent. Durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    command: list[str] = Field([], description="the program and its arguments; no shell")
    python: str | None = Field(
        None, pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$",
        description='in the place of command: "module:function", called with the input; it returns the result',
    )  # fmt: skip
    interpreter: str = Field(
        "", description="the Python of such an agent (default: .venv/bin/python in its folder, else python3)"
    )
    preload: list[Module] = Field([], description="libraries that are imported once, for all attempts of such an agent")
    folder: str = Field("", description="where it is started, seen from the file's folder (default: that folder)")
    input_schema: dict[str, Any] | None = Field(
        None, description="JSON Schema that the input must fit: a table, or the name of a JSON file"
    )
    max_attempts: int | None = Field(None, gt=0, description="in the place of the setting of that name")
    attempt_timeout: float | None = Field(None, gt=0, description="in the place of the setting of that name")
    idle_timeout: float | None = Field(None, gt=0, description="in the place of the setting of that name")
    children: list[Name] = Field([], description="agents whose runs it may start (docs/agent-api.md)")

    @model_validator(mode="after")
    def _is_one_program(self) -> "AgentTable":
        if bool(self.command) == bool(self.python):
            raise ValueError('an agent has a command, or python = "module:function"')
        if self.python is None and (self.interpreter or self.preload):
            raise ValueError('interpreter and preload go with python = "module:function"')
        own = (self.python or "").partition(":")[0].partition(".")[0]
        if any(name.partition(".")[0] == own for name in self.preload):
            # A client that is built before the environment is set has no proxy, ever.
            raise ValueError(f"preload is for libraries; {own} is the agent's own, and is imported in each attempt")
        return self

    @field_validator("input_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            from jsonschema import Draft202012Validator, SchemaError
            from jsonschema.validators import validator_for

            try:
                validator_for(schema, default=Draft202012Validator).check_schema(schema)
            except SchemaError as error:
                raise ValueError(f"no JSON Schema: {error.json_path}: {_short(error.message)}") from error
        return schema


def declared(agents: Mapping[str, AgentTable], name: str) -> AgentTable:
    """The table of the agent *name*. Raises UsageError, with the names that there are."""
    if name in agents:
        return agents[name]
    known = f"there are {', '.join(sorted(agents))}" if agents else "none is"
    raise UsageError(f"agent {name!r} is not declared: {known} ([agents.NAME] in twiceshy.toml)")


def check_input(name: str, table: AgentTable, given: bytes | None) -> None:
    """Raise UsageError, one line, unless *given* (None: no input, which is ``null``) is JSON and fits the agent."""
    value = None if given is None else payload.read(given, len(given), f"the input of agent {name}")
    if table.input_schema is None:
        return
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    # A registry of its own: else a $ref to an address is fetched from there.
    validator = validator_for(table.input_schema, default=Draft202012Validator)(table.input_schema, registry=Registry())
    try:
        found = best_match(validator.iter_errors(value))
    except Unresolvable as error:
        raise UsageError(f"input_schema of agent {name} refers to {error.ref!r}, which is not in it") from error
    except RecursionError as error:
        raise UsageError(f"the input of agent {name} is nested too deep for its input_schema") from error
    if found is not None:
        raise UsageError(f"the input of agent {name} does not fit: {found.json_path}: {_short(found.message)}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
