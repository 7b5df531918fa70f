"""Settling an ambiguous step: what the agent is answered with where the person only says that it happened."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime import payload, runs
from runtime.database import Connection
from runtime.entries import Headers
from runtime.errors import UsageError
from runtime.runs import How
from runtime.step import Kind, RunStatus


@dataclass(frozen=True, slots=True)
class Given:
    """What the person says that the answer was; None, or no headers: nothing of that."""

    status: int | None = None
    headers: Headers = ()
    body: bytes | None = None

    @property
    def explicit(self) -> bool:
        """Whether anything was said."""
        return self.status is not None or self.body is not None or bool(self.headers)


#: What the rule of a step's request (head and body, as kept) says that ``assume_done`` means; None: it says nothing.
Assume = Callable[[bytes, bytes], Given | None]


async def settle(
    connection: Connection, run_id: str, step_key: str, how: How, given: Given, assume: Assume
) -> RunStatus:
    """``runs.resolve``, with the answer completed: by the rule, else 200 with ``{}``, and a content type for JSON.

    That of a local step is what its agent would have handed in: an output (null where none is given), or an error.
    """
    if how == "send_again" and given.explicit:
        raise UsageError("status, headers and body are the answer of assume_done; send_again gets a real one")
    answer = given
    if how == "assume_done":
        kind, first_head, first_body = await runs.first_request(connection, run_id, step_key)
        if kind is Kind.LOCAL:
            answer = _handed_in(f"run {run_id}: the answer of the local step {step_key}", given)
        elif not given.explicit:
            answer = assume(first_head, first_body) or given
    body = b"{}" if answer.body is None else answer.body
    headers = answer.headers
    if b"content-type" not in {name.lower() for name, _ in headers} and _is_json(body):
        headers += ((b"Content-Type", b"application/json"),)
    return await runs.resolve(
        connection, run_id, step_key, how, status=answer.status or 200, headers=headers, body=body,
        explicit=given.explicit,
    )  # fmt: skip


def _handed_in(what: str, given: Given) -> Given:
    """*given* as what came of a local step. Raises UsageError."""
    body = b'{"output": null}' if given.body is None else given.body
    said = payload.read(body, len(body), what)
    if not isinstance(said, dict) or set(said) not in ({"output"}, {"error"}) or given.status not in (None, 200):
        raise UsageError(f'{what} is {{"output": …}} or {{"error": …}}, with the status 200')
    return replace(given, body=body)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True
