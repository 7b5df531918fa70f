"""What events, their ids, and local steps may be called. Pure."""

import re

from runtime.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9._~-]{1,200}")


def check_name(what: str, name: str) -> str:
    """*name*, if *what* may be called so. Raises UsageError."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{what} {name[:200]!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ ~ -")
    return name
