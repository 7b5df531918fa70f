"""Where two requests differ, field by field, in words for a person. Pure."""

from dataclasses import dataclass

from proxy.message import Request
from proxy.profiles import Rule


@dataclass(frozen=True, slots=True)
class Difference:
    """One field. ``path`` can be put into a rule's ``ignore`` as it stands; None: the field is absent there."""

    path: str
    old: str | None
    new: str | None


def difference(old: Request, new: Request, rule: Rule) -> list[Difference]:
    """Fields in which *old* and *new* differ under *rule*; empty if and only if their canonical forms are equal."""
    raise NotImplementedError
