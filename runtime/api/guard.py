"""Who may speak to the API: nobody without a key, and no web page but its own. Pure.

A page that somebody's browser shows can send requests to this host, and by a name that it makes resolve to this host it
can read the answers, too. So the name by which the API is called must be one of its own, a request that a page of
another origin sends is refused, and nothing here tells a browser that another origin may read (no CORS). The key comes
in ``Authorization`` alone: no cookie, no address carries it, so that no browser adds it by itself.
"""

import ipaddress
from collections.abc import Mapping

from runtime.api.problems import Problem


def judge(headers: Mapping[str, str], names: frozenset[str]) -> Problem | None:
    """Why a request with these *headers* is refused; None: it is not. *names*: by which the API may be called."""
    host = headers.get("Host", "")
    if not _is_own(_name(host), names):
        return Problem(400, f"the API was called by the name {host[:200]!r}, which is not its own (setting api_hosts)")
    origin = headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return Problem(403, "the API is not for web pages of other origins")
    if "twiceshy-" in headers.get("Via", ""):
        return Problem(403, "the API is not for agents by their proxy: they have http://twiceshy.internal/")
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return Problem(403, "the API is not for web pages of other origins")
    return None


def bearer(authorization: str | None) -> str | None:
    """The key that an ``Authorization`` header brings."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _name(host: str) -> str:
    """Of a Host header, the name."""
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_own(name: str, names: frozenset[str]) -> bool:
    """An address is nothing that somebody else could make resolve to us."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in names
    return True


def own_names(listening: str, further: str) -> frozenset[str]:
    """``localhost``, where it listens, and what the setting adds."""
    return frozenset({"localhost", listening.lower(), *(each.strip().lower() for each in further.split(","))} - {""})
