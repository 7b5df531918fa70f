"""The environment that an agent is given, as data. Pure.

What was inherited is overwritten: an inherited ``NO_PROXY=localhost`` would let calls past the journal, an
inherited proxy would lead them elsewhere. Both cases are set because curl reads only ``http_proxy``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
#: Set, but empty: some clients take an absent NO_PROXY for "localhost goes direct".
EMPTIED = ("NO_PROXY", "no_proxy")
#: ALL_PROXY is read by half of the clients, and by some before HTTP_PROXY; SSL_CERT_DIR beats a bundle in others.
REMOVED = ("ALL_PROXY", "all_proxy", "SSL_CERT_DIR")
#: Each is read by somebody alone, and each replaces the client's own roots: hence a bundle that has both.
BUNDLE_NAMES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)  # fmt: skip


#: What a process may have of its own beside ours.
KEPT = ("PYTHONPATH", "NODE_OPTIONS")


@dataclass(frozen=True, slots=True)
class Kit:
    """What lies ready on the disk for an agent's process."""

    site: Path  # folder with sitecustomize.py and the twiceshy package, for PYTHONPATH
    preload: Path  # for Node
    ca: Path  # the sidecar's CA certificate alone
    bundle: Path  # the system's roots and that one


def proxy_url(run: str, token: str, proxy: str) -> str:
    """The proxy address with the run's credentials. Ids and tokens need no escaping (DESIGN §2)."""
    return f"http://{run}:{token}@{proxy}"


def environment(
    base: Mapping[str, str], *, run: str, token: str, proxy: str, kit: Kit | None = None, database: str | None = None
) -> dict[str, str]:
    """*base* with what makes an unchanged program speak through the sidecar at *proxy* as *run*.

    *database*: where twiceshy's tables are, for transactions of the agent's own. Without *kit* only plain HTTP is
    reached. Settings of twiceshy itself (``TWICESHY_*``) are passed on: an agent may start another one.
    """
    result = {name: value for name, value in base.items() if name not in REMOVED}
    result.update(dict.fromkeys(PROXY_NAMES, proxy_url(run, token, proxy)))
    result.update(dict.fromkeys(EMPTIED, ""))
    result.update(TWICESHY_RUN=run, TWICESHY_TOKEN=token)
    if database is not None:
        result["TWICESHY_DATABASE_URL"] = database
    if kit is not None:
        result.update(dict.fromkeys(BUNDLE_NAMES, str(kit.bundle)))
        result.update(TWICESHY_CA_FILE=str(kit.ca), NODE_EXTRA_CA_CERTS=str(kit.ca), NODE_USE_ENV_PROXY="1")
        result["PYTHONPATH"] = _before(str(kit.site), base.get("PYTHONPATH"), ":")
        result["NODE_OPTIONS"] = _before(f'--require "{kit.preload}"', base.get("NODE_OPTIONS"), " ")
    return result


def _before(ours: str, theirs: str | None, between: str) -> str:
    """*ours*, then what was there; once, also when an agent starts another one."""
    if not theirs:
        return ours
    return theirs if ours in theirs else f"{ours}{between}{theirs}"


def exports(given: Mapping[str, str]) -> list[str]:
    """The lines that put *given* into a shell, for ``eval "$(twiceshy env)"``. Any POSIX shell takes them."""
    lines = [f"unset {' '.join(REMOVED)}"]
    for name, value in sorted(given.items()):
        quoted = value.replace("'", "'\\''")
        lines.append(f"export {name}='{quoted}'")
    return lines
