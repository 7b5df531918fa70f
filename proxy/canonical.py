"""Canonical form of a request, and the prints made from it. Pure."""

from proxy.message import Request
from proxy.profiles import Rule


def canonical(request: Request, rule: Rule) -> bytes:
    """The canonical form of *request* (DESIGN §4). CPU-bound: large bodies go to a thread."""
    raise NotImplementedError


def fingerprint(request: Request, rule: Rule) -> bytes:
    """32 bytes: sha256 of the canonical form."""
    raise NotImplementedError


def secondary(request: Request, rule: Rule, secret: bytes) -> bytes:
    """16 bytes: keyed hash of the headers that are neither in the fingerprint nor noise."""
    raise NotImplementedError
