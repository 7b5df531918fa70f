"""Every setting, in one class: ``twiceshy.toml`` < ``TWICESHY_*`` in the environment < flags.

The file is looked for from the working folder upwards, or named by ``TWICESHY_CONFIG``. Unknown names
are an error. ``twiceshy env`` and the docs print the help texts below.
"""

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.agents import AgentTable, Name
from runtime.errors import UsageError
from runtime.names import shortened


class Settings(BaseModel):
    """All settings with their defaults. Durations in seconds, sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mode: Literal["durable", "journal", "naive"] = Field(
        "durable",
        description="durable; to compare with: journal (no keys, what is unknown is sent again), naive (forward only)",
    )
    unidentified: Literal["refuse", "pass"] = Field(
        "refuse", description="what becomes of requests that name no run: refuse, or pass (on, without a journal)"
    )
    lease: float = Field(
        30.0, gt=0, description="how long an attempt or a sidecar is believed alive unheard of; renewed each third"
    )
    connect_timeout: float = Field(10.0, gt=0, description="to connect to an upstream")
    first_byte_timeout: float = Field(900.0, gt=0, description="from the request's last byte to the answer's head")
    silence_timeout: float = Field(300.0, gt=0, description="between two pieces of an answer's body")
    exchange_timeout: float = Field(7200.0, gt=0, description="for a whole exchange")
    tunnel_timeout: float = Field(
        3600.0, gt=0, description="for a tunnel that is not opened, or a WebSocket, in which nothing moves"
    )
    record_wait: float = Field(60.0, gt=0, description="how long an answer's end is held back for its record")
    database_wait: float = Field(20.0, gt=0, description="how long a request is held while Postgres is away")
    resend: int = Field(
        2, ge=0, description="how often the sidecar itself sends again after a network failure (never at_most_once)"
    )
    request_body_max: int = Field(64 << 20, gt=0, description="largest request body")
    memory_body: int = Field(
        1 << 20, gt=0, description="an answer's body beyond this goes through a file and into pieces"
    )
    index_body: int = Field(
        16 << 10, ge=0, description="an answer's body up to this is kept with the run's index in memory"
    )
    client_buffer: int = Field(256 << 10, gt=0, description="how much of an answer may be on its way to one client")
    gateway_hosts: str = Field(
        "", description="further names, comma separated, by which the gateway address may be called"
    )
    max_attempts: int = Field(5, gt=0, description="consecutive attempts that die or fail without a new step")
    backoff: float = Field(
        1.0, ge=0, description="before the second restart in a row without a new step; doubles up to a minute"
    )
    attempt_timeout: float | None = Field(
        None, gt=0, description="how long one attempt of an agent may take; then it is ended, and counts as failed"
    )
    idle_timeout: float = Field(
        3600.0,
        gt=0,
        description="an attempt of a worker, or without a launcher, ends after this long without a request",
    )
    payload_max: int = Field(
        1 << 20, gt=0, description="largest payload of an event, input or output of a step at twiceshy.internal"
    )
    result_max: int = Field(4 << 20, gt=0, description="largest result of a run")
    continue_after: int = Field(
        1000, gt=0, description="steps of an attempt from which on it is told to continue as a new run"
    )
    hold: float = Field(3.0, gt=0, description="how long a sleep or wait is held open before its run may park")
    park_quiet: float = Field(2.0, ge=0, description="a run parks only when nothing came from its agent for this long")
    poll: float = Field(1.0, gt=0, description="how often the database is asked for what may have changed")
    drain: float = Field(10.0, ge=0, description="how long a stopping sidecar waits for its exchanges")
    slots: int = Field(4, gt=0, description="how many agents a worker runs at a time")
    drain_agents: float = Field(
        30.0, ge=0, description="how long a stopping worker lets its agents go on before it interrupts them"
    )
    preload_timeout: float = Field(
        60.0, gt=0, description="how long a fork server may take to import what its agents preload"
    )
    start_key_retention: float = Field(
        2592000.0, gt=0, description="how long the key of a start is remembered after its run has ended"
    )
    input_max: int = Field(16 << 20, gt=0, description="largest input of a run that is started")
    api_body_max: int = Field(20 << 20, gt=0, description="largest body of a request to the API")
    api_page_max: int = Field(200, gt=0, description="largest page of a list of the API")
    api_wait_max: float = Field(60.0, gt=0, description="how long the API holds a request that waits for a result")
    api_tails: int = Field(100, ge=0, description="how many live tails an API process serves at a time")
    api_tail_max: float = Field(3600.0, gt=0, description="a live tail ends after this long; its client resumes it")
    api_hosts: str = Field("", description="further names, comma separated, by which the API may be called")
    token_price: float | None = Field(
        None, ge=0, description="what a million tokens cost, about: for the estimate of money that replay saved"
    )
    extra_ca: str | None = Field(None, description="file of further CA certificates for upstreams")
    deny_private: bool = Field(
        False, description="refuse private addresses as upstreams (link-local and metadata always are)"
    )
    route: list[dict[str, Any]] = Field(default_factory=list, description="[[route]] tables, see docs/rules.md")
    agents: dict[Name, AgentTable] = Field(
        default_factory=dict, description="[agents.NAME] tables, see docs/workers.md"
    )


#: Nothing of a sidecar's: who differs in these alone shares one.
NOT_OF_SIDECARS = frozenset(
    {
        "agents",
        "slots",
        "drain_agents",
        "attempt_timeout",
        "preload_timeout",
        "start_key_retention",
        "input_max",
        "token_price",
    }
    | {"api_body_max", "api_page_max", "api_wait_max", "api_tails", "api_tail_max", "api_hosts"}
)
#: Tables: in the file only.
TABLES = frozenset({"route", "agents"})


def config_file(start: Path | None = None) -> Path | None:
    """The rule file that holds: TWICESHY_CONFIG, else the nearest twiceshy.toml upwards, else None."""
    named = os.environ.get("TWICESHY_CONFIG")
    if named:
        if not Path(named).is_file():
            raise UsageError(f"TWICESHY_CONFIG names {named}, which is no file")
        return Path(named).resolve()
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "twiceshy.toml").is_file():
            return folder / "twiceshy.toml"
    return None


#: TWICESHY_* names that are not settings: they place and identify.
NOT_SETTINGS = frozenset(
    {"TWICESHY_CONFIG", "TWICESHY_HOME", "TWICESHY_RUN", "TWICESHY_TOKEN", "TWICESHY_CA_FILE", "TWICESHY_DOCTOR"}
    | {"TWICESHY_API", "TWICESHY_API_KEY", "TWICESHY_DATABASE_URL"}
)


def load(flags: dict[str, Any] | None = None, start: Path | None = None) -> Settings:
    """Read file, environment and *flags* (later wins). Raises UsageError with one line that says where."""
    values: dict[str, Any] = {}
    path = config_file(start)
    if path is not None:
        try:
            text = path.read_text("utf-8")
            # JSON is what a keeper hands its sidecar: settings as they were when it was asked for.
            values.update(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
            _place(values.get("agents"), path.parent)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}") from error
    for name, text in os.environ.items():
        if name.startswith("TWICESHY_") and name not in NOT_SETTINGS and name != "TWICESHY_FAILPOINT":
            values[name.removeprefix("TWICESHY_").lower()] = text
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        origin = f"TWICESHY_{where.upper()}" if f"TWICESHY_{where.upper()}" in os.environ else str(path or "flags")
        raise UsageError(f"{origin}: setting {where!r}: {_words(first)}") from error


def _words(error: Any) -> str:
    """What is wrong with a value, in words of our own where pydantic's are for programmers."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = AgentTable.model_fields if error["loc"][0] == "agents" else Settings.model_fields
            near = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
            return "there is none of that name" + (f"; is {near[0]!r} meant?" if near else "")
        case "value_error":
            return str(limits["error"])
        case "missing":
            return "it is missing"
        case "greater_than":
            words = f"a number above {limits['gt']:g}"
        case "greater_than_equal":
            words = f"a number from {limits['ge']:g} on"
        case "literal_error":
            words = str(limits["expected"])
        case "finite_number" | "float_parsing" | "float_type":
            words = "a number"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            words = "a whole number"
        case "bool_parsing" | "bool_type":
            words = "true or false"
        case "string_type":
            words = "a text"
        case "list_type":
            words = "a list"
        case "dict_type" | "model_type":
            words = "a table"
        case "string_pattern_mismatch":
            words = "module:function" if error["loc"][-1] == "python" else f"a name of the form {limits['pattern']}"
        case _:
            words = str(error["msg"])
    return f"{words}, not {shortened(repr(error.get('input')))}"


def _place(agents: Any, folder: Path) -> None:
    """What agents say of files is seen from the *folder* of the file that says it; a schema is read."""
    for name, table in agents.items() if isinstance(agents, dict) else ():
        if not isinstance(table, dict):
            continue
        if isinstance(table.get("folder", ""), str):
            table["folder"] = str(folder / table.get("folder", ""))
        if isinstance(python := table.get("interpreter"), str) and "/" in python:
            table["interpreter"] = str(folder / python)
        if isinstance(schema := table.get("input_schema"), str):
            try:
                table["input_schema"] = json.loads((folder / schema).read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"setting 'agents.{name}.input_schema': {folder / schema}: {error}") from error
