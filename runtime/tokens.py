"""Ids of runs, and the tokens of their attempts. Both stand in a proxy's address, as user name and password. Pure."""

import base64
import hashlib
import re
import secrets
from uuid import UUID

from runtime.errors import UsageError
from runtime.names import shortened

#: What a run may be called.
RUN_ID = re.compile(r"[A-Za-z0-9._~-]{1,200}")


def new_id() -> str:
    """The id of a new run."""
    return "r" + base64.b32encode(secrets.token_bytes(13)).decode("ascii")[:20].lower()


def derived_id(uuid: UUID, what: str) -> str:
    """The id of a run that comes of another one: the same however often it is asked for; *uuid*: that one's."""
    return (
        "r" + base64.b32encode(hashlib.sha256(uuid.bytes + what.encode("utf-8")).digest()).decode("ascii")[:20].lower()
    )


def check_id(run_id: str) -> str:
    """*run_id*, or UsageError."""
    if not RUN_ID.fullmatch(run_id):
        raise UsageError(f"run id {shortened(run_id)!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ ~ -")
    return run_id


def hash_token(token: str) -> bytes:
    """What of a token is stored."""
    return hashlib.sha256(token.encode("utf-8")).digest()


def new_token() -> str:
    """A token: 256 random bits, and no character that an address would escape."""
    return secrets.token_urlsafe(32)
