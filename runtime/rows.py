"""Between the journal's values and its rows. Pure.

``entry_row`` makes what ``twiceshy.write`` takes; ``outcome`` reads what it says. ``step_row`` and
``answer_row`` understand what was stored, or raise Unreadable: a row that is not understood is never taken
for one that is not there.
"""

from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar
from uuid import UUID

from runtime.entries import (
    Answer,
    AnswerFacts,
    AnswerRow,
    Begun,
    Conflict,
    Decision,
    Entry,
    Fence,
    Fenced,
    Headers,
    Intent,
    Outcome,
    Own,
    PutBack,
    Read,
    Recorded,
    StepFacts,
    StepRow,
    Stop,
    Stopped,
)
from runtime.errors import Unreadable, Unwritable
from runtime.step import Effect, Finality, Kind, RunStatus, State


class Row(Protocol):
    """A row as asyncpg gives it."""

    def __getitem__(self, key: str, /) -> Any: ...


E = TypeVar("E", bound=StrEnum)

# ---- the type twiceshy.entry, field by field (tested against the database)

_HEAD = ("kind", "run_id", "key", "exchange", "token_hash", "sidecar", "attempt", "place", "replaces")
_FACTS = (
    "effect", "explicit", "fingerprint", "occurrence", "secondary", "method", "url", "wire_key",
    "request_head", "request_body", "rules",
)  # fmt: skip
_ANSWER = (
    "status", "reason", "headers", "body", "body_id", "size", "whole", "finality", "own", "tokens",
)  # fmt: skip
_WHY = ("becomes", "message", "evidence")
_OWN = ("step_kind", "subject", "seconds", "until")
ENTRY = (*_HEAD, *_FACTS, *_ANSWER, *_WHY, *_OWN, "event")

_NO_FACTS = (None,) * len(_FACTS)
_NO_ANSWER = (None,) * len(_ANSWER)
_NO_WHY = (None,) * len(_WHY)
_NO_OWN = (None,) * len(_OWN)
_NO_FENCE = (None, None)


def entry_row(entry: Entry) -> tuple[Any, ...]:
    """The entry as a value of the type ``twiceshy.entry``. Raises Unwritable for headers that cannot be kept."""
    head: tuple[Any, ...]
    match entry:
        case Intent(fence=fence, facts=facts):
            head = (
                "intent",
                fence.run_id,
                facts.key,
                entry.exchange,
                *_fence(fence),
                None,
                entry.place,
                entry.replaces,
            )
            return (*head, *_facts(facts), *_NO_ANSWER, *_NO_WHY, *_own(facts), None)
        case Answer():
            head = ("answer", entry.run_id, entry.key, entry.exchange, *_NO_FENCE, entry.attempt, None, None)
            own = (Kind.APPROVAL if entry.timed_out else None, *_NO_OWN[1:])
            return (*head, *_NO_FACTS, *_answer(entry.facts), entry.state, None, None, *own, entry.event)
        case Read(fence=fence, facts=facts):
            head = ("read", fence.run_id, facts.key, entry.exchange, *_fence(fence), entry.attempt, entry.place, None)
            return (*head, *_facts(facts), *_answer(entry.answer), *_NO_WHY, *_own(facts), None)
        case PutBack():
            head = ("put_back", entry.run_id, entry.key, entry.exchange, *_NO_FENCE, None, None, None)
            return (*head, *_NO_FACTS, *_NO_ANSWER, *_NO_WHY, *_NO_OWN, None)
        case Stop(fence=fence):
            head = ("stop", fence.run_id, entry.step, entry.exchange, *_fence(fence), None, None, None)
            return (*head, *_NO_FACTS, *_NO_ANSWER, entry.status, entry.message, entry.evidence, *_NO_OWN, None)


def size(row: tuple[Any, ...]) -> int:
    """About how many bytes *row* takes on its way."""
    return 400 + sum(len(value) for value in row if type(value) is bytes)


def _fence(fence: Fence) -> tuple[bytes, str]:
    return fence.token_hash, fence.sidecar


def _facts(facts: StepFacts) -> tuple[Any, ...]:
    return (
        facts.effect, facts.explicit, facts.fingerprint, facts.occurrence, facts.secondary, facts.method, facts.url,
        facts.wire_key, facts.request_head, facts.request_body, facts.rules,
    )  # fmt: skip


def _own(facts: StepFacts) -> tuple[Any, ...]:
    own = facts.own
    return _NO_OWN if own is None else (own.kind, own.subject, own.seconds, own.until)


def _answer(facts: AnswerFacts) -> tuple[Any, ...]:
    return (
        facts.status, facts.reason, encode_headers(facts.headers), facts.body, facts.body_id, facts.size, facts.whole,
        facts.finality, facts.own, facts.tokens,
    )  # fmt: skip


# ---- headers: one "name:value" per line, as on the wire


def encode_headers(headers: Headers) -> bytes:
    """The stored form. Raises Unwritable for what would read back as something else."""
    for name, value in headers:
        if not name or b":" in name or b"\n" in name or b"\n" in value or b"\r" in name or b"\r" in value:
            raise Unwritable(f"a header cannot be kept as it is: {name[:100]!r}: {value[:100]!r}")
    return b"".join([b"%b:%b\r\n" % pair for pair in headers])


def decode_headers(stored: bytes) -> Headers:
    """What ``encode_headers`` was given. Raises ValueError for anything it never makes."""
    if not stored:
        return ()
    if not stored.endswith(b"\r\n"):
        raise ValueError("headers are cut")
    pairs = []
    for line in stored[:-2].split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if not name or not colon or b"\n" in line or b"\r" in line:
            raise ValueError(f"no header: {line[:100]!r}")
        pairs.append((name, value))
    return tuple(pairs)


# ---- outcomes


def outcome(run_id: str, row: Row) -> Outcome:
    """What ``twiceshy.write`` says of an entry of run *run_id*."""
    match row["outcome"]:
        case "recorded":
            return Recorded(row["recorded"] or 0, row["begun"] or 0)
        case "begun":
            return Begun(row["begun"], row["first_sent"], row["at"])
        case "conflict":
            return Conflict()
        case "fenced":
            return Fenced()
        case "elsewhere":
            return Fenced(row["other"])
        case "stopped":
            return Stopped(known(RunStatus, row["status"], f"run {run_id}"), row["stop_step"], row["stop_message"])
        case other:
            raise Unreadable(f"twiceshy.write answered {other!r}: the database was migrated by another version")


def judge(row: Row | None, fence: Fence) -> Fenced | Stopped | None:
    """Why *fence* does not hold, from the run's row (None: no such run); None: it holds."""
    if row is None or row["token_hash"] is None or row["token_hash"] != fence.token_hash:
        return Fenced()
    status = known(RunStatus, row["status"], f"run {fence.run_id}")
    if status is not RunStatus.RUNNING:
        return Stopped(status, row["stop_step"], row["stop_message"], row["continued_as"])
    if row["sidecar"] is not None and row["sidecar"] != fence.sidecar:
        return Fenced(row["sidecar"])
    return None


# ---- what is read


def known(kind: type[E], value: str, what: str) -> E:
    """*value* as a member of *kind*, or Unreadable."""
    try:
        return kind(value)
    except ValueError:
        raise Unreadable(
            f"{what}: {kind.__name__.lower()} {value!r} is unknown to this version of twiceshy; nothing was sent"
        ) from None


def step_row(run_id: str, row: Row, *, sidecar_dead: bool) -> StepRow:
    """One row of ``load_steps``."""
    what = f"run {run_id}, step {row['key']}"
    effect, state = known(Effect, row["effect"], what), known(State, row["state"], what)
    kind = known(Kind, row["kind"], what)
    if len(row["fingerprint"]) != 32 or len(row["secondary"]) != 16:
        raise Unreadable(f"{what}: a fingerprint has the wrong length; nothing was sent")
    body = row["request_body"]
    return StepRow(
        facts=StepFacts(
            key=row["key"],
            effect=effect,
            explicit=row["explicit"],
            fingerprint=row["fingerprint"],
            occurrence=row["occurrence"],
            secondary=row["secondary"],
            method=row["method"],
            url=row["url"],
            wire_key=row["wire_key"],
            request_head=row["request_head"],
            request_body=body or b"",
            rules=row["rules"],
            own=None if kind is Kind.HTTP else Own(kind, row["subject"], until=row["deadline"]),
        ),
        begun=row["begun"],
        attempt=row["attempt"],
        state=state,
        exchange=row["exchange"] if state is State.SENT else None,
        sidecar=row["sidecar"] if state is State.SENT else None,
        sidecar_dead=sidecar_dead,
        place=row["place"],
        first_sent_at=row["begun_at"],
        tries=row["tries"],
        request_loaded=body is not None,
    )


def decision(row: Row) -> Decision:
    """What a person said, of a row of ``waiting`` or ``approvals_named``."""
    return Decision(row["key"], row["name"], row["decision"], row["decided_by"], row["comment"], row["decided_at"])


def with_body(facts: StepFacts, body: bytes) -> StepFacts:
    """*facts* with the first bytes that were left in the database."""
    return replace(facts, request_body=body)


def answer_row(run_id: str, row: Row, n: int) -> AnswerRow:
    """One row of ``load_answers``, which must be number *n* of its step's list."""
    what = f"run {run_id}, step {row['key']}, answer {row['n']}"
    if row["n"] != n:
        raise Unreadable(f"{what}: answer {n} is missing; nothing was sent")
    try:
        headers = decode_headers(row["headers"])
    except ValueError as error:
        raise Unreadable(f"{what}: {error}; nothing was sent") from error
    body: bytes | None = row["body"]
    body_id: UUID | None = row["body_id"]
    if not row["inline"] and body_id is None:
        if row["size"]:
            raise Unreadable(f"{what}: its body of {row['size']} bytes is missing; nothing was sent")
        body = b""
    if body is not None and len(body) != row["size"]:
        raise Unreadable(f"{what}: its body has {len(body)} bytes and should have {row['size']}; nothing was sent")
    return AnswerRow(
        n=n,
        recorded=row["recorded"],
        attempt=row["attempt"],
        facts=AnswerFacts(
            status=row["status"],
            reason=row["reason"],
            headers=headers,
            body=body,
            body_id=body_id,
            size=row["size"],
            whole=row["whole"],
            finality=known(Finality, row["finality"], what),
            own=row["own"],
            tokens=row["tokens"],
        ),
    )
