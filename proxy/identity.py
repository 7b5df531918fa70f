"""Which run, attempt and step a request names, and what it asks for. Pure (DESIGN §2).

Three forms: proxy credentials (``http://RUN:TOKEN@sidecar``), headers (``Twiceshy-Run``, ``-Token``,
``-Step``), the gateway path (``/@RUN:TOKEN/https/host/path``). Whatever was meant for the sidecar is
stripped here, so that a run token never reaches an upstream.
"""

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import unquote

from proxy.message import Headers
from proxy.refusals import Refusal

NAME = re.compile(r"[A-Za-z0-9._~-]{1,200}\Z")
STEP = re.compile(r"[A-Za-z0-9._~:/@+=,-]{1,200}\Z")
#: The password that stands for "no token" (``twiceshy env``): clients send nothing without a password.
NO_TOKEN = "none"
INTERNAL = "twiceshy.internal"

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/?#@\s]+))(?::([0-9]{1,5}))?\Z")
#: Clients name a WebSocket's address by a scheme of its own. Its handshake is an HTTP request.
_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
#: Hop-by-hop, and what a proxy says to us. Host is rebuilt from the target; framing is our own.
_STRIPPED = frozenset(
    {
        b"host", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"content-length", b"expect", b"http2-settings",
    }
)  # fmt: skip
#: Never stripped because a client lists them in ``Connection`` (a way to lose a header upstream).
_KEPT = frozenset({b"authorization"})


@dataclass(frozen=True, slots=True)
class Named:
    """Who speaks. ``token`` None: the run is named without one."""

    run: str
    token: str | None
    step: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for. ``target``: raw path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def shown(self) -> str:
        """Host and port, for people: a client named them, so nothing that moves a terminal's cursor, and no book."""
        host = ascii(self.host)[1:-1][:200]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def internal(self) -> bool:
        """It is the sidecar itself that is asked. No DNS knows names below ``.internal``."""
        return self.host == INTERNAL or self.host.endswith("." + INTERNAL)


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What CONNECT said, which holds for every request inside. ``refusal``: given inside, CONNECT is always accepted.

    ``target.scheme`` is https until the first byte inside tells otherwise.
    """

    target: Target
    named: Named | None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Addressed:
    """A request's head, understood. ``named`` None: it names no run."""

    named: Named | None
    target: Target
    headers: Headers
    gateway: bool


def connect(head: bytes) -> Tunnel:
    """Read the head of a CONNECT, without its empty line. Whatever is wrong with it is said inside the tunnel."""
    lines = head.split(b"\r\n")
    nowhere = Target("https", "invalid", 443, "/")
    parts = lines[0].split(b" ")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            return Tunnel(nowhere, None, _bad("the head of its CONNECT is malformed"))
        headers.append((name, value.strip()))
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        return Tunnel(nowhere, None, _bad("the head of its CONNECT is malformed"))
    found = authority(parts[1].decode("latin-1"), 443)
    if isinstance(found, Refusal):
        return Tunnel(nowhere, None, found)
    target = Target("https", *found, "/")
    named = _credentials(tuple(headers))
    if isinstance(named, Refusal):
        return Tunnel(target, None, named)
    merged = _by_header(tuple(headers), [] if named is None else [named])
    return Tunnel(target, None, merged) if isinstance(merged, Refusal) else Tunnel(target, merged)


def _credentials(headers: Headers) -> Named | Refusal | None:
    values = _values(headers, b"proxy-authorization")
    if len(values) > 1:
        return _bad("two Proxy-Authorization headers")
    return _basic(values[0]) if values else None


def address(raw_target: str, headers: Headers, tunnel: Tunnel | None = None) -> Addressed | Refusal:
    """Read the head of a request. *tunnel*: what CONNECT named, for requests inside a tunnel."""
    found: list[Named] = []
    if tunnel is not None and tunnel.refusal is not None:
        return tunnel.refusal
    if tunnel is not None and tunnel.named is not None:
        found.append(tunnel.named)
    credentials = _credentials(headers)
    if isinstance(credentials, Refusal):
        return credentials
    if credentials is not None:
        found.append(credentials)

    gateway = tunnel is None and raw_target.startswith("/@")
    if gateway:
        if _from_a_page(headers):
            return _bad("the gateway address is not for web pages: the request carries Origin or Sec-Fetch-*")
        parsed = _gateway(raw_target)
        if isinstance(parsed, Refusal):
            return parsed
        named, target = parsed
        found.append(named)
    else:
        outer = tunnel.target if tunnel is not None else None
        read = _target(raw_target, outer)
        if isinstance(read, Refusal):
            return read
        target = read
        if outer is not None and not _of_tunnel(target, outer, headers):
            return _bad(f"inside a tunnel to {outer.host}:{outer.port} it names another host")

    by_header = _by_header(headers, found)
    if isinstance(by_header, Refusal):
        return by_header
    return Addressed(by_header, target, end_to_end(headers), gateway)


def end_to_end(headers: Headers) -> Headers:
    """*headers* without hop-by-hop ones, those named in Connection, Proxy-* and Twiceshy-*."""
    dropped = set(_STRIPPED)
    for value in _values(headers, b"connection"):
        dropped.update(part.strip().lower() for part in value.split(b",") if part.strip().lower() not in _KEPT)
    return tuple(
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in dropped and not lower.startswith((b"proxy-", b"twiceshy-"))
    )


def _from_a_page(headers: Headers) -> bool:
    """True if a browser sent it.

    Node's own fetch sends ``Sec-Fetch-Mode: cors`` too, its WebSocket ``websocket``, but no other of its kind.
    """
    telling = [
        (lower, value)
        for name, value in headers
        if (lower := name.lower()) == b"origin" or lower.startswith(b"sec-fetch-")
    ]
    return bool(telling) and telling not in ([(b"sec-fetch-mode", b"cors")], [(b"sec-fetch-mode", b"websocket")])


def _of_tunnel(target: Target, tunnel: Target, headers: Headers) -> bool:
    """True if neither an absolute target nor Host names anybody but whom CONNECT named."""
    port = 443 if tunnel.scheme == "https" else 80
    hosts = [authority(value.decode("latin-1"), port) for value in _values(headers, b"host")]
    same = (target.scheme, target.host, target.port) == (tunnel.scheme, tunnel.host, tunnel.port)
    return same and all(host == (tunnel.host, tunnel.port) for host in hosts)


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _bad(why: str, code: str = "bad-request") -> Refusal:
    return Refusal(code, f"twiceshy cannot take this request: {why}. Nothing was sent.")


def _name(text: str, what: str) -> str | Refusal:
    # axios and global-agent send percent-encoding as it is; decoding once more is safe, the result is checked.
    if not NAME.match(text):
        text = unquote(text)
    if NAME.match(text):
        return text
    return _bad(f"{what} must be 1 to 200 of A-Z a-z 0-9 . _ ~ -", "bad-identity")


def _pair(text: str, where: str) -> Named | Refusal:
    run_text, colon, token_text = text.partition(":")
    run = _name(run_text, f"the run in {where}")
    if isinstance(run, Refusal):
        return run
    if not colon or not token_text:
        return _bad(f"run {run} in {where} has no token (say '{NO_TOKEN}' for none)", "bad-identity")
    token = _name(token_text, f"the token in {where}")
    if isinstance(token, Refusal):
        return token
    return Named(run, None if token == NO_TOKEN else token, None)


def _basic(value: bytes) -> Named | Refusal:
    scheme, _, encoded = value.strip().partition(b" ")
    if scheme.lower() != b"basic":
        return _bad("Proxy-Authorization is not Basic", "bad-identity")
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return _bad("Proxy-Authorization is not base64 of RUN:TOKEN", "bad-identity")
    return _pair(text, "the proxy credentials")


def _by_header(headers: Headers, found: list[Named]) -> Named | Refusal | None:
    """Merge what headers name into what credentials or the gateway path named."""
    texts: dict[str, str] = {}
    for name in ("run", "token", "step"):
        values = _values(headers, f"twiceshy-{name}".encode())
        if len(values) > 1:
            return _bad(f"two Twiceshy-{name.title()} headers", "bad-identity")
        if values:
            texts[name] = values[0].decode("latin-1").strip()
    if "step" in texts and not STEP.match(texts["step"]):
        return _bad("Twiceshy-Step must be 1 to 200 of A-Z a-z 0-9 . _ ~ : / @ + = , -", "bad-identity")
    for name in ("run", "token"):
        if name in texts:
            checked = _name(texts[name], f"Twiceshy-{name.title()}")
            if isinstance(checked, Refusal):
                return checked
            texts[name] = checked
    runs = {named.run for named in found} | ({texts["run"]} if "run" in texts else set())
    if len(runs) > 1:
        return _bad(f"it names {len(runs)} runs: {', '.join(sorted(runs))}", "bad-identity")
    if not runs:
        if texts:
            return _bad("it has Twiceshy-Token or Twiceshy-Step but names no run", "bad-identity")
        return None
    tokens = {named.token for named in found if named.token is not None}
    if "token" in texts and texts["token"] != NO_TOKEN:
        tokens.add(texts["token"])
    if len(tokens) > 1:
        return _bad("it carries two tokens", "bad-identity")
    return Named(runs.pop(), tokens.pop() if tokens else None, texts.get("step"))


def authority(text: str, default_port: int) -> tuple[str, int] | Refusal:
    """Read ``host[:port]``; the host in lower case. Userinfo, empty names and ports beyond 65535 are refused."""
    if "@" in text:
        return _bad("the target carries user information")
    match = _AUTHORITY.match(text)
    if match is None:
        return _bad(f"{text!r} is no host")
    port = int(match[3]) if match[3] else default_port
    if not 0 < port < 65536:
        return _bad(f"{port} is no port")
    host = (match[1] or match[2]).lower().removesuffix(".")
    if not all(host.split(".")):
        return _bad(f"{text!r} is no host")
    return host, port


def is_address(host: str) -> bool:
    """True for an IP address, in which no name must be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _target(raw: str, tunnel: Target | None) -> Target | Refusal:
    if raw.startswith("/") or raw == "*":
        if tunnel is None:
            return _bad(
                "it is addressed to the sidecar itself. Use the sidecar as a proxy (HTTP_PROXY), "
                "or its gateway address /@RUN:TOKEN/https/HOST/PATH"
            )
        return Target(tunnel.scheme, tunnel.host, tunnel.port, "/" if raw == "*" else raw)
    scheme, separator, rest = raw.partition("://")
    scheme = _SCHEMES.get(scheme.lower(), "")
    if not separator or not scheme:
        return _bad(f"{raw[:80]!r} is no http URL")
    cut = min((index for index in (rest.find("/"), rest.find("?")) if index >= 0), default=len(rest))
    host = authority(rest[:cut], 443 if scheme == "https" else 80)
    if isinstance(host, Refusal):
        return host
    tail = rest[cut:].partition("#")[0]
    return Target(scheme, *host, tail if tail.startswith("/") else "/" + tail)


def _gateway(raw: str) -> tuple[Named, Target] | Refusal:
    pair, _, rest = raw[2:].partition("/")
    named = _pair(pair, "the gateway address")
    if isinstance(named, Refusal):
        return named
    scheme, _, rest = rest.partition("/")
    if scheme not in _SCHEMES:
        return _bad("a gateway address reads /@RUN:TOKEN/https/HOST/PATH")
    target = _target(f"{scheme}://{rest}", None)
    if isinstance(target, Refusal):
        return target
    return named, target
