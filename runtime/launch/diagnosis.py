"""What ``twiceshy doctor`` found, in words and as data. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runtime.launch.causes import Cause, Evidence, Frame
from runtime.launch.causes import cause as cause_of
from runtime.launch.sightings import SERVICES, WEB, Address, Kind, Transport
from runtime.tape import UNJOURNALLED

# ---- probes


class Outcome(StrEnum):
    """What became of a probe."""

    REACHED = "reached"  # the sidecar answered
    REFUSED = "refused"  # the sidecar answered, and does not know whose request it is
    PAST = "past"  # the name was looked for elsewhere
    DISTRUSTS = "distrusts"  # the CA
    FAILED = "failed"


#: Clients that no environment leads anywhere: how they fare says something of a program that uses them only.
NEVER_LED = frozenset({"urllib3.PoolManager"})
_NOWHERE = (
    "name or service not known", "name resolution", "nodename nor servname", "no address associated", "getaddrinfo",
    "enotfound", "eai_again", "could not resolve host", "failed to resolve",
)  # fmt: skip
_DISTRUST = (
    "certificate_verify_failed", "certificate verify failed", "self-signed", "self signed",
    "unable to get local issuer", "unable_to_verify", "unable_to_get_issuer", "certificate problem", "ssl certificate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """One question by one client. ``words``: what the client said when it was not answered by the sidecar."""

    client: str
    scheme: str
    outcome: Outcome
    version: str = ""
    words: str = ""

    @property
    def well(self) -> bool:
        return self.outcome is Outcome.REACHED or self.client in NEVER_LED


def probe(told: Mapping[str, Any], *, run: str, sidecar: str) -> Probe:
    """What a line of a probe's output means. *told*: client, scheme, version, answer or error."""
    answer, error = told.get("answer"), str(told.get("error") or "")
    try:
        met = json.loads(answer) if isinstance(answer, str) else None
    except ValueError:
        met = None
    if isinstance(met, dict) and (met.get("sidecar"), met.get("run")) == (sidecar, run):
        outcome = Outcome.REACHED
    elif isinstance(met, dict) and isinstance(met.get("error"), dict) and "twiceshy" in str(met["error"].get("type")):
        outcome, error = Outcome.REFUSED, str(met.get("message"))
    elif answer is not None:
        outcome, error = Outcome.PAST, f"somebody else answered: {str(answer)[:80]!r}"
    elif any(each in error.lower() for each in _DISTRUST):
        outcome = Outcome.DISTRUSTS
    elif any(each in error.lower() for each in _NOWHERE):
        outcome = Outcome.PAST
    else:
        outcome = Outcome.FAILED
    client, scheme, version = (str(told.get(name, "")) for name in ("client", "scheme", "version"))
    return Probe(client, scheme, outcome, version, error[:300])


# ---- connections


@dataclass(frozen=True, slots=True)
class Connection:
    """What one process did with one address. ``name``: what it had looked up, as far as it told."""

    kind: Kind
    transport: Transport
    evidence: Evidence
    count: int = 1
    outcome: str = ""
    name: str = ""

    @property
    def to(self) -> Address:
        return self.evidence.to


@dataclass(frozen=True, slots=True)
class Past:
    """An address that was reached past the sidecar, by one cause."""

    transport: Transport
    to: Address
    name: str
    cause: Cause
    at: Frame | None
    through: tuple[str, ...]
    command: str
    pids: tuple[int, ...]
    count: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found.

    ``arrived``: host -> fate -> requests. ``limits``: what the watching cannot see. ``failure``: why it ended early.
    """

    run: str
    command: str
    ended: str
    watched: str
    limits: Sequence[str] = ()
    interpreter: str = ""
    probes: Sequence[Probe] = ()
    arrived: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    distrusts: Sequence[str] = ()
    connections: Sequence[Connection] = ()
    notes: Sequence[str] = ()
    failure: str = ""

    @property
    def past(self) -> list[Past]:
        """The streams (and HTTP/3) that went past, those of one cause together."""
        groups: dict[object, list[Connection]] = {}
        for each in self.connections:
            if each.kind in (Kind.PAST, Kind.QUIC) and service(each) == "":
                e = each.evidence
                groups.setdefault((each.transport, each.to, cause(each).name, e.caller, e.process.command), []).append(
                    each
                )
        return [_together(group) for group in groups.values()]

    @property
    def requests(self) -> dict[str, dict[str, int]]:
        """What arrived, but for what passed through as it came."""
        return self._arrived(unjournalled=False)

    @property
    def unjournalled(self) -> dict[str, dict[str, int]]:
        """What passed through as it came: tunnels that rules name, WebSockets."""
        return self._arrived(unjournalled=True)

    def _arrived(self, *, unjournalled: bool) -> dict[str, dict[str, int]]:
        chosen = {
            host: {fate: n for fate, n in fates.items() if (fate in UNJOURNALLED) is unjournalled}
            for host, fates in self.arrived.items()
        }
        return {host: fates for host, fates in chosen.items() if fates}

    @property
    def unproved(self) -> bool:
        """Probes were made, and none reached the sidecar."""
        return bool(self.probes) and all(each.outcome is not Outcome.REACHED for each in self.probes)

    @property
    def well(self) -> bool:
        return not (self.past or self.distrusts or self.unproved or self.failure)

    def of(self, kind: Kind) -> list[Connection]:
        """The connections of *kind*, but services by whatever it is known that they are none of HTTP."""
        if kind is Kind.SERVICE:
            return [each for each in self.connections if each.kind is kind or service(each)]
        return [each for each in self.connections if each.kind is kind]


_HTTP3 = Cause("HTTP/3", lambda _e: True, "HTTP/3 (QUIC), which knows no proxy", "switch HTTP/3 off in that client")


def cause(connection: Connection) -> Cause:
    """Why it went past."""
    return _HTTP3 if connection.kind is Kind.QUIC else cause_of(connection.evidence)


def service(connection: Connection) -> str:
    """Of a connection on this machine to what does not speak HTTP, what it speaks; else empty."""
    if not connection.to.loopback or connection.kind not in (Kind.PAST, Kind.SERVICE):
        return ""
    if connection.kind is Kind.SERVICE:
        return SERVICES[connection.to.port]
    return cause(connection).speaks


def _together(group: list[Connection]) -> Past:
    first = group[0]
    packages = [name for name in first.evidence.libraries if "." not in name and name not in _STANDARD]
    return Past(
        first.transport, first.to, next((each.name for each in group if each.name), ""), cause(first),
        first.evidence.caller, tuple(reversed(packages)), first.evidence.process.command,
        tuple(sorted({each.evidence.process.pid for each in group})), sum(each.count for each in group), first.outcome,
    )  # fmt: skip


#: Modules of the standard library that stand in frames and tell a reader nothing.
_STANDARD = frozenset(
    {"socket", "ssl", "threading", "contextlib", "queue", "runpy", "net", "tls", "http", "https", "events", "timers"}
    | {"_http_client", "_http_agent", "_tls_wrap", "selectors", "contextvars"}
)


# ---- words

_MARKS = {True: "✔", False: "✘"}
_SAID = {
    Outcome.REACHED: "reached the sidecar",
    Outcome.REFUSED: "reached the sidecar, which does not know its run",
    Outcome.PAST: "went past it",
    Outcome.DISTRUSTS: "does not trust the CA",
    Outcome.FAILED: "failed",
}
_CURES = {
    Outcome.REFUSED: "the credentials in the proxy address are lost: keep the variables as they are",
    Outcome.PAST: "it reads no proxy variables here",
    Outcome.DISTRUSTS: "keep SSL_CERT_FILE, REQUESTS_CA_BUNDLE, NODE_EXTRA_CA_CERTS, PYTHONPATH as they are; "
    "docs/https.md has more",
}


def lines(found: Diagnosis) -> list[str]:
    """The report."""
    out = [f"doctor · run {found.run} · {found.ended} · {_short(found.command)}"]
    out += _section(f"a name that only the sidecar knows, asked for by {found.interpreter}", _probes(found.probes))
    arrived = [f"{host}  {_fates(fates)}" for host, fates in found.requests.items()]
    out += _section("requests that arrived", arrived)
    out += _section("TLS that failed", [f"{_MARKS[False]} {each}" for each in found.distrusts])
    blind = [f"{host}  {_fates(fates)}" for host, fates in found.unjournalled.items()]
    out += _section("passed through, but not journalled", blind)
    out += _section("past the sidecar", [line for each in found.past for line in _past(each)])
    local = [f"{each.to}  {service(each)}  {_who(each)}" for each in found.of(Kind.SERVICE)]
    out += _section("not HTTP through the sidecar: local services", local)
    out += _section("allowed to go past it", [f"{each.to}  {_who(each)}" for each in found.of(Kind.ALLOWED)])
    out += _section("datagrams", [f"{each.to}  {_who(each)}" for each in found.of(Kind.DATAGRAM)])
    out += _section("names were looked up at", sorted({str(each.to) for each in found.of(Kind.LOOKUP)}))
    out += _section(f"watched by {found.watched}", found.limits)
    out += _section("notes", found.notes)
    return [*out, "", _verdict(found)]


def _section(title: str, body: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in body)] if body else []


def _probes(probes: Sequence[Probe]) -> list[str]:
    out = []
    for client in dict.fromkeys(each.client for each in probes):
        mine = [each for each in probes if each.client == client]
        said = [f"{each.scheme} {_SAID[each.outcome]}".strip() for each in mine]
        if len({each.outcome for each in mine}) == 1:
            said = [f"{' and '.join(each.scheme for each in mine)} {_SAID[mine[0].outcome]}".strip()]
        if client in NEVER_LED:
            mark, why = "·", " (as always: it reads no proxy variables; see whether the program uses it itself)"
        else:
            mark = _MARKS[all(each.well for each in mine)]
            bad = next((each for each in mine if not each.well), None)
            why = "" if bad is None else f": {_CURES.get(bad.outcome, bad.words)}"
        out.append(f"{mark} {client} {mine[0].version}".rstrip() + f"  {', '.join(said)}{why}")
    return out


def _fates(fates: Mapping[str, int]) -> str:
    return ", ".join(_some(n, fate) if fate in UNJOURNALLED else f"{n} {fate}" for fate, n in fates.items())


def _past(each: Past) -> list[str]:
    shown = f"{each.to} ({each.name})" if each.name and each.name != each.to.host else str(each.to)
    looks = " · looks like HTTP(S)" if each.to.port in WEB else ""
    how = "".join(f", {word}" for word in [each.outcome] if word)
    pids = ", ".join(map(str, each.pids[:5])) + (" …" if len(each.pids) > 5 else "")
    times = _some(each.count, "datagram" if each.transport is Transport.UDP else "connection")
    at = f"{each.at}: " if each.at is not None else ""
    through = f"{' → '.join(each.through)}: " if each.through else ""
    return [
        f"{_MARKS[False]} {shown} · {times}{how}{looks} · pid {pids}: {_short(each.command)}",
        f"    {at}{through}{each.cause.words}",
        f"    what to do: {each.cause.remedy}",
    ]


def _who(each: Connection) -> str:
    failed = f" ({each.outcome})" if each.outcome else ""
    return f"pid {each.evidence.process.pid}: {_short(each.evidence.process.command)}{failed}"


def live(each: Connection) -> str:
    """A line about a connection past the sidecar, at the moment when it is seen."""
    return f"past the sidecar: {each.to} · {_who(each)}"


def _verdict(found: Diagnosis) -> str:
    if found.well:
        if not found.arrived and not found.connections:
            return f"{_MARKS[True]} it spoke to nobody: nothing went past the sidecar, and nothing through it"
        return f"{_MARKS[True]} nothing that was seen went past the sidecar"
    said = []
    if found.unproved:
        said.append("no client that was tried reached the sidecar")
    if found.past:
        said.append(f"{_some(len({each.to for each in found.past}), 'address', 'es')} reached past the sidecar: what "
                    "goes there is not journalled, and happens again with each restart")  # fmt: skip
    if found.failure:
        said.append(f"the watching failed, so that not all was seen: {found.failure}")
    if found.distrusts:
        said.append("TLS failed, so that requests did not arrive")
    return f"{_MARKS[False]} {'; '.join(said)}"


def _some(n: int, thing: str, plural: str = "s") -> str:
    return f"{n} {thing}{'' if n == 1 else plural}"


def _short(command: str) -> str:
    plain = " ".join("".join(each if each.isprintable() else " " for each in command).split())
    return plain if len(plain) <= 100 else f"{plain[:99]}…"


# ---- for programs


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data, for ``--json``."""
    return {
        "run": found.run,
        "command": found.command,
        "ended": found.ended,
        "well": found.well,
        "watched": found.watched,
        "limits": list(found.limits),
        "interpreter": found.interpreter,
        "probes": [
            {"client": each.client, "version": each.version, "scheme": each.scheme, "outcome": str(each.outcome),
             "words": each.words} for each in found.probes
        ],
        "arrived": found.requests,
        "tls_failed": list(found.distrusts),
        "unjournalled": found.unjournalled,
        "past": [
            {"address": each.to.host, "port": each.to.port, "transport": str(each.transport), "name": each.name,
             "cause": each.cause.name, "words": each.cause.words, "remedy": each.cause.remedy,
             "at": None if each.at is None else str(each.at), "through": list(each.through), "command": each.command,
             "pids": list(each.pids), "connections": each.count, "outcome": each.outcome} for each in found.past
        ],
        "services": [_connection_json(each) | {"speaks": service(each)} for each in found.of(Kind.SERVICE)],
        "allowed": [_connection_json(each) for each in found.of(Kind.ALLOWED)],
        "datagrams": [_connection_json(each) for each in found.of(Kind.DATAGRAM)],
        "lookups": [_connection_json(each) for each in found.of(Kind.LOOKUP)],
        "notes": list(found.notes),
        "failure": found.failure,
    }  # fmt: skip


def _connection_json(each: Connection) -> dict[str, Any]:
    return {
        "address": each.to.host, "port": each.to.port, "transport": str(each.transport),
        "pid": each.evidence.process.pid, "command": each.evidence.process.command, "connections": each.count,
        "outcome": each.outcome,
    }  # fmt: skip
