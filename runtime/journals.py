"""The journal of a run, page by page, as people may see it."""

from dataclasses import dataclass, field
from datetime import datetime

from runtime import listing, redact, rows
from runtime.database import Connection, sql
from runtime.runs import in_transaction


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a step, once. Headers and the beginning of the body with credentials masked; None: no text."""

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


@dataclass(frozen=True, slots=True)
class Step:
    """A step; *n*: its number in the run, from 1; *begun*: its place among steps, answers and events."""

    key: str
    n: int
    begun: int
    attempt: int
    kind: str
    effect: str
    state: str
    method: str
    url: str
    name: str | None
    begun_at: datetime
    deadline: datetime | None
    evidence: str | None
    answers: list[Answer] = field(default_factory=list)


@in_transaction
async def page(connection: Connection, run_id: str, *, behind: int, limit: int) -> list[Step]:
    """The first steps of the run behind a place, in the order in which they began. Raises NotFound."""
    await listing.line(connection, run_id)
    found = await connection.fetch(sql("journal"), run_id, behind, limit)
    names = [name for name in Step.__slots__ if name not in ("name", "answers")]
    steps = {row["key"]: Step(**{name: row[name] for name in names}, name=row["subject"]) for row in found}
    for row in await connection.fetch(sql("journal_answers"), run_id, list(steps), redact.SHOWN + 8):
        steps[row["key"]].answers.append(_answer(row))
    return list(steps.values())


def _answer(row: rows.Row) -> Answer:
    given = rows.decode_headers(row["headers"])
    names = [name for name in Answer.__slots__ if name not in ("headers", "body")]
    return Answer(
        **{name: row[name] for name in names},
        headers=redact.headers(given),
        body=redact.body(row["beginning"], given),
    )
