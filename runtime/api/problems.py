"""Problems: every answer of the API that is no success, as RFC 9457 says it. Pure."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from runtime.errors import (
    DatabaseAway,
    Held,
    NotFound,
    NotNow,
    Taken,
    TwiceshyError,
    Unreadable,
    Unwritable,
    UsageError,
)

MEDIA_TYPE = "application/problem+json"
#: Seconds after which a request that the database's absence ended may be tried again.
RETRY_AFTER = 2

#: What each status means here, for the document.
MEANINGS = {
    400: "the request cannot be understood: no JSON, or a name that is not this API's",
    401: "no key, or a wrong one: `Authorization: Bearer KEY`",
    403: "a web page of another origin asks",
    404: "there is no such run, step or path",
    405: "the path has other methods (`Allow`)",
    408: "the body did not come in time",
    409: "it cannot be done as things stand, or stands for something else already",
    413: "the body is larger than a setting allows",
    415: "the body is not said to be `application/json`",
    422: "a field, parameter or input does not fit; `errors` says which",
    429: "a limit of this process is reached",
    500: "a fault of the server's own; its log tells more",
    503: "the database cannot be reached: ask again, a start under the same key, an event under the same id",
}


class Problem(Exception):
    """What to answer instead. *more*: further members."""

    def __init__(
        self, status: int, detail: str, more: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.more = more or {}
        self.headers = headers or {}

    def as_json(self) -> dict[str, Any]:
        """The body."""
        title = HTTPStatus(self.status).phrase
        return {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail, **self.more}


#: Where an error of ``runtime.errors`` leads to.
_STATUS: tuple[tuple[type[TwiceshyError], int], ...] = (
    (NotFound, 404),
    (Taken, 409),
    (NotNow, 409),
    (Held, 409),
    (Unwritable, 422),
    (UsageError, 422),
    (DatabaseAway, 503),
    (Unreadable, 500),
)


def of(error: TwiceshyError) -> Problem:
    """The problem that *error* is."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return Problem(status, str(error), headers={"Retry-After": str(RETRY_AFTER)} if status == 503 else {})


def misfits(where: str, found: Sequence[Mapping[str, Any]]) -> Problem:
    """What pydantic says of a body, or of parameters."""
    errors = [
        {"where": ".".join([where, *map(str, each["loc"])]), "what": str(each["msg"])[:300]} for each in found[:20]
    ]
    return Problem(422, "; ".join(f"{each['where']}: {each['what']}" for each in errors[:3]), {"errors": errors})
