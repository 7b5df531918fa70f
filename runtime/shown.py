"""Runs, attempts and steps as people and launchers see them. Pure."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from runtime import rows
from runtime.step import Effect, Finality, Kind, RunStatus, State


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, for people and launchers. ``wake_at``, ``wake_on``: until when and for what a parked one waits."""

    id: str
    uuid: UUID
    agent: str
    status: RunStatus
    input: bytes | None
    result: bytes | None
    error: str | None
    attempt: int
    sidecar: str | None
    lease_left: float | None
    counter: int
    newest: int
    tokened: bool
    barren: int
    for_workers: bool
    priority: int
    not_before: datetime
    stop_step: str | None
    stop_message: str | None
    created_at: datetime
    changed_at: datetime
    ended_at: datetime | None
    wake_at: datetime | None
    wake_on: list[str] | None
    parent: str | None
    continued_from: str | None
    continued_as: str | None
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt. ``counter_at``: the run's counter at the claim; ``tape``: what its sidecar saw, JSON."""

    n: int
    kind: str
    host: str
    folder: str
    process: str | None
    sidecar: str | None
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    exit_code: int | None
    counter_at: int
    tape: bytes | None


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step, for people. ``statuses``: of its answers, in order; ``finality``: of the last one.

    ``error``: what the last answer of a local step or child says, where that is a failure.
    """

    key: str
    begun: int
    attempt: int
    kind: Kind
    effect: Effect
    state: State
    method: str
    url: str
    wire_key: str | None
    sidecar: str | None
    begun_at: datetime
    sent_at: datetime
    subject: str | None
    deadline: datetime | None
    evidence: str | None
    statuses: tuple[int, ...]
    finality: Finality | None
    tokens: int
    error: str | None


def run(row: rows.Row) -> RunRow:
    """Of the statements ``run`` and ``runs``."""
    values: dict[str, Any] = {name: row[name] for name in RunRow.__slots__}
    return RunRow(
        **values
        | {
            "status": rows.known(RunStatus, row["status"], f"run {row['id']}"),
            "attributes": json.loads(row["attributes"] or "{}"),
        }
    )


def attempt(row: rows.Row) -> AttemptRow:
    """Of the statements ``attempt`` and ``attempts``."""
    return AttemptRow(**{name: row[name] for name in AttemptRow.__slots__})


def step(run_id: str, row: rows.Row) -> StepLine:
    """Of the statement ``steps``."""
    what = f"run {run_id}, step {row['key']}"
    values: dict[str, Any] = {name: row[name] for name in StepLine.__slots__ if name != "error"}
    kind = rows.known(Kind, row["kind"], what)
    return StepLine(
        **values
        | {
            "kind": kind,
            "error": _error(kind, row["end"]),
            "effect": rows.known(Effect, row["effect"], what),
            "state": rows.known(State, row["state"], what),
            "finality": None if row["finality"] is None else rows.known(Finality, row["finality"], what),
            "statuses": tuple(row["statuses"]),
        }
    )


def _error(kind: Kind, end: bytes | None) -> str | None:
    """By what a local step or child failed. It is for people: what cannot be read is left out."""
    try:
        said = json.loads(end or b"null")
        if kind is Kind.LOCAL:
            error = said["error"]
            if isinstance(error, dict) and "type" in error and "message" in error:  # as the library hands it in
                return f"{error['type']}: {error['message']}"
            return error if isinstance(error, str) else json.dumps(error)
        status = said["status"]
        return None if status == RunStatus.DONE else f"{status}: {said['error']}" if said.get("error") else f"{status}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
