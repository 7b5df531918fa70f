"""Attributes: what whoever starts a run says of it, to find it by. A small flat map of strings. Pure."""

import re
from collections.abc import Mapping

from runtime.errors import UsageError

#: How many a run may have.
COUNT_MAX = 32
#: How long a value may be, in characters.
VALUE_MAX = 500
NAME = re.compile(r"[A-Za-z0-9._~-]{1,100}")
#: No control characters, line ends among them.
VALUE = re.compile(rf"[^\x00-\x1f\x7f-\x9f]{{0,{VALUE_MAX}}}")


def check(attributes: Mapping[str, str]) -> dict[str, str]:
    """*attributes*, sorted by name. Raises UsageError."""
    if len(attributes) > COUNT_MAX:
        raise UsageError(f"{len(attributes)} attributes: a run has at most {COUNT_MAX}")
    return dict(sorted(_check(name, value) for name, value in attributes.items()))


def _check(name: str, value: str) -> tuple[str, str]:
    if not NAME.fullmatch(name):
        raise UsageError(f"attribute {name[:100]!r}: a name is 1 to 100 of the characters A-Z a-z 0-9 . _ ~ -")
    if not VALUE.fullmatch(value) or any("\ud800" <= each <= "\udfff" for each in value):
        raise UsageError(
            f"attribute {name}: a value is at most {VALUE_MAX} characters, none of them a control character"
        )
    return name, value


def read(text: str) -> tuple[str, str]:
    """Of ``NAME:VALUE``, name and value. Raises UsageError."""
    name, colon, value = text.partition(":")
    if not colon:
        raise UsageError(f"attribute {text[:100]!r}: NAME:VALUE")
    return _check(name, value)
