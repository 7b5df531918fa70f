"""The environment that an agent is given, as data. Pure.

What was inherited is overwritten: an inherited ``NO_PROXY=localhost`` would let calls past the journal, an
inherited proxy would lead them elsewhere. Both cases are set because curl reads only ``http_proxy``.
"""

from collections.abc import Mapping
from pathlib import Path

PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
#: Set, but empty: some clients take an absent NO_PROXY for "localhost goes direct".
EMPTIED = ("NO_PROXY", "no_proxy")
#: ALL_PROXY is read by half of the clients, and by some before HTTP_PROXY.
REMOVED = ("ALL_PROXY", "all_proxy")


def proxy_url(run: str, token: str, proxy: str) -> str:
    """The proxy address with the run's credentials. Ids and tokens need no escaping (DESIGN §2)."""
    return f"http://{run}:{token}@{proxy}"


def environment(
    base: Mapping[str, str], *, run: str, token: str, proxy: str, library: Path | None = None
) -> dict[str, str]:
    """*base* with what makes an unchanged program speak through the sidecar at *proxy* as *run*.

    *library* is the folder that holds the ``twiceshy`` package (and ``sitecustomize``): it comes first on
    PYTHONPATH. Settings of twiceshy itself (``TWICESHY_*``) are passed on: an agent may start another one.
    """
    result = {name: value for name, value in base.items() if name not in REMOVED}
    result.update(dict.fromkeys(PROXY_NAMES, proxy_url(run, token, proxy)))
    result.update(dict.fromkeys(EMPTIED, ""))
    result.update(TWICESHY_RUN=run, TWICESHY_TOKEN=token)
    if library is not None:
        rest = base.get("PYTHONPATH")
        result["PYTHONPATH"] = f"{library}:{rest}" if rest else str(library)
    return result


def exports(given: Mapping[str, str]) -> list[str]:
    """The lines that put *given* into a shell, for ``eval "$(twiceshy env)"``. Any POSIX shell takes them."""
    lines = [f"unset {' '.join(REMOVED)}"]
    for name, value in sorted(given.items()):
        quoted = value.replace("'", "'\\''")
        lines.append(f"export {name}='{quoted}'")
    return lines
