"""The one client that sends, once.

aiohttp re-sends GET, HEAD, OPTIONS, TRACE, PUT and DELETE by itself when a server closes before answering,
even on a fresh connection: a client middleware turns the errors that set this off into one that does not.
No connection is shared between runs; ``at_most_once`` goes out on a fresh one, since a POST on a connection
that the upstream has just closed is bytes out and no answer.
"""

import asyncio
import errno
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import aiohappyeyeballs
import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from multidict import CIMultiDict
from yarl import URL

from proxy.identity import is_address
from proxy.message import Headers, Request
from proxy.mishaps import broken, unreached
from proxy.refusals import Refusal, http2_only
from runtime.errors import UsageError
from runtime.failpoints import armed, reach
from runtime.names import shortened
from runtime.settings import Settings

_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_HEAD_LIMIT = 64 << 10
_HEADERS_LIMIT = 1000
#: How much of what an upstream sends is taken in at once, where it is passed on as it comes.
PIECE = 64 << 10
#: A second address is tried when the first has not answered for so long, in seconds (RFC 8305).
_NEXT_ADDRESS = 0.25
#: The first frame of an HTTP/2 server, SETTINGS, as aiohttp quotes what it cannot read.
_HTTP2_FRAME = re.compile(r"""b['"]\\x00\\x00(?:\\x..|\\.|.)\\x04\\x0[01](?:\\x00){4}""")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


#: Seconds for an upstream to end a stream whose terminal event it has sent.
AFTER_THE_END = 2.0


class NotSent(Exception):
    """Certainly no request reached the upstream: DNS, refused, TLS failure, time limit to connect."""


class Interrupted(aiohttp.ClientError):
    """Bytes left, or may have; no whole head came back."""


class Cut(Exception):
    """The body ended before its end."""


class Denied(Exception):
    """The destination is not one that an agent may reach through the sidecar."""


class Withheld(Exception):
    """Certainly no byte reached the upstream: at the last moment it was not to be sent any more."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Silent(Exception):
    """A time limit passed after bytes had left. The message names the limit."""


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise Interrupted(broken(error)) from error


#: Metadata services that are no link-local address: of AWS, Google, Alibaba, Oracle, Azure.
_METADATA = frozenset({"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"})


@dataclass(frozen=True, slots=True)
class Reach:
    """Where an agent may go through this sidecar. ``own_ports``: where twiceshy itself listens, the API too."""

    own_ports: frozenset[int]
    deny_private: bool

    def check(self, text: str, port: int) -> None:
        """Raise Denied for an IP address that no agent may reach. A name passes: what it resolves to is checked."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return
        # IPv4 in the forms of IPv6: mapped, 6to4, and what a NAT64 gateway translates.
        inner = [getattr(address, "ipv4_mapped", None), getattr(address, "sixtofour", None)]
        if address.version == 6 and address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        for each in (address, *inner):
            if each is not None:
                self._check(text, port, each)

    def _check(self, text: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
        if address.is_link_local or address.is_multicast or address.is_unspecified or str(address) in _METADATA:
            raise Denied(f"{text} is a link-local, metadata, multicast or unspecified address")
        if address.is_loopback and port in self.own_ports:
            raise Denied(f"{text}:{port} is twiceshy itself")
        if self.deny_private and (address.is_private or address.is_loopback):
            raise Denied(f"{text} is a private address, and deny_private is set")


class _CheckedResolver(AbstractResolver):
    """Resolves once; the connection is made to the addresses that were checked."""

    def __init__(self, reach: Reach) -> None:
        self._inner = ThreadedResolver()
        self._reach = reach

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            found = await self._inner.resolve(host, port, family)
        except UnicodeError as error:  # a label longer than 63, a name longer than 253
            raise OSError(errno.EINVAL, "a part of it is too long, or no part of a name") from error
        for result in found:
            # A scope (fe80::1%eth0) is no part of the address.
            self._reach.check(result["host"].partition("%")[0], result["port"])
        return found

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True, slots=True)
class _Sending:
    """One sending: who has the last word on it, and the clock that runs from its last byte to the answer's head."""

    last_word: Callable[[], None] | None
    clock: asyncio.Timeout
    limit: float

    def begin(self) -> None:
        if self.last_word is not None:
            self.last_word()
        self.go_on()

    def go_on(self) -> None:
        if not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time() + self.limit)


async def _before_the_first_byte(
    _: object, context: SimpleNamespace, head: aiohttp.TraceRequestHeadersSentParams
) -> None:
    """aiohttp calls this when the connection stands, before it writes."""
    reach("before-first-byte")
    context.trace_request_ctx.begin()
    if armed("request-written") and head.headers.get("Content-Length", "0") == "0":
        _soon()


async def _before_the_body(_: object, context: SimpleNamespace, __: object) -> None:
    """And this before it writes a piece of the body, with the head."""
    context.trace_request_ctx.go_on()
    if armed("request-written"):
        _soon()


def _soon() -> None:
    # What is told here is written without a pause.
    asyncio.get_running_loop().call_soon(reach, "request-written")


def _watched() -> aiohttp.TraceConfig:
    watched = aiohttp.TraceConfig()
    watched.on_request_headers_sent.append(_before_the_first_byte)
    watched.on_request_chunk_sent.append(_before_the_body)
    return watched


class Answering:
    """An upstream's answer under way."""

    def __init__(self, response: aiohttp.ClientResponse, silence: float) -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        self.reason = (response.reason or "").encode("utf-8", "surrogateescape")
        self.headers: Headers = tuple(response.raw_headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Cut when it ends too early, Silent when nothing comes."""
        content = self._response.content
        while not content.at_eof():
            try:
                async with asyncio.timeout(self._silence):
                    data = await content.readany()
            except TimeoutError as error:
                raise Silent(f"no byte for {self._silence:g} s (silence_timeout)") from error
            except (aiohttp.ClientError, OSError) as error:
                raise Cut(broken(error)) from error
            if not data:
                return
            yield data

    def said_all(self) -> None:
        """What came is all that there is to come: the rest is not waited for as long."""
        self._silence = min(self._silence, AFTER_THE_END)

    def close(self) -> None:
        """Give the connection up; one whose body was read whole has already gone back."""
        self._response.close()


class Upstream:
    """Sends requests for runs. One per sidecar."""

    def __init__(self, settings: Settings, *, via: str, own_ports: frozenset[int]) -> None:
        self._settings = settings
        self._via = via
        self._reach = Reach(own_ports, settings.deny_private)
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._used: dict[str, float] = {}
        self._tls = ssl.create_default_context()
        # An upstream that speaks HTTP/2 only says so in the handshake, before it has had a request.
        self._tls.set_alpn_protocols(["http/1.1"])
        if settings.extra_ca:
            try:
                self._tls.load_verify_locations(settings.extra_ca)
            except OSError as error:
                raise UsageError(f"extra_ca: {settings.extra_ca}: {error.strerror or error}") from error
        self._resolver = _CheckedResolver(self._reach)

    @property
    def limit(self) -> float:
        """Seconds for a whole exchange."""
        return self._settings.exchange_timeout

    async def send(
        self, run: str, request: Request, *, fresh: bool, last_word: Callable[[], None] | None = None
    ) -> Answering:
        """Send *request* once, answer with its head. Raises NotSent, Interrupted, Silent, Denied.

        *last_word* is asked when only the first byte is missing: what it raises (Withheld) is raised, and nothing sent.
        """
        self.check(request)
        session = self._session(f"{run}\n" if fresh else run, fresh=fresh)
        limit = self._settings.first_byte_timeout
        try:
            async with asyncio.timeout(self._settings.connect_timeout + limit) as clock:
                response = await session.request(
                    request.method,
                    URL(request.url, encoded=True),
                    headers=self._headers(request),
                    data=request.body or None,
                    allow_redirects=False,
                    trace_request_ctx=_Sending(last_word, clock, limit),
                )
        except aiohttp.ClientConnectorError as error:
            raise NotSent(unreached(error, request.host, request.port)) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise NotSent(f"no connection in {self._settings.connect_timeout:g} s (connect_timeout)") from error
        except aiohttp.InvalidURL as error:
            raise NotSent(f"{shortened(request.host)} is no host") from error
        except TimeoutError as error:
            raise Silent(f"no answer within {limit:g} s (first_byte_timeout)") from error
        except Interrupted:
            raise
        except aiohttp.ClientResponseError as error:
            if _HTTP2_FRAME.search(error.message):
                # Who begins so takes a request of ours for a connection's malformed beginning, and reads no further.
                raise NotSent(http2_only(request.host, request.port, request.host)) from error
            raise Interrupted(broken(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(broken(error)) from error
        if response.status < 200:
            response.close()
            raise Interrupted(f"the answer is {response.status}, which nobody asked for")
        return Answering(response, self._settings.silence_timeout)

    async def open(self, host: str, port: int, *, tls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection for what is passed on as it comes; with *tls*, verified. Raises NotSent, Denied."""
        self._check(host, port)
        limit = self._settings.connect_timeout
        try:
            async with asyncio.timeout(limit):
                found = await self._addresses(host, port)
                sock = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS)
                return await asyncio.open_connection(
                    sock=sock, limit=PIECE, ssl=self._tls if tls else None, server_hostname=host if tls else None
                )
        except TimeoutError as error:
            raise NotSent(f"no connection in {limit:g} s (connect_timeout)") from error
        except OSError as error:  # ssl's errors are such, too
            raise NotSent(unreached(error, host, port)) from error

    async def _addresses(self, host: str, port: int) -> list[AddrInfoType]:
        if is_address(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return [(family, socket.SOCK_STREAM, 0, "", (host, port))]
        found = await self._resolver.resolve(host, port, socket.AF_UNSPEC)
        return [(each["family"], socket.SOCK_STREAM, each["proto"], "", (each["host"], port)) for each in found]

    def check(self, request: Request) -> None:
        """Raise Denied when *request* is addressed to where no agent may go, or to this sidecar itself."""
        self._check(request.host, request.port)
        if any(name.lower() == b"via" and self._via.encode() in value for name, value in request.headers):
            raise Denied("the request came back to the sidecar that sent it (Via)")

    def _check(self, host: str, port: int) -> None:
        self._reach.check(host, port)
        if host in ("metadata.google.internal", "metadata"):
            raise Denied(f"{host} is a metadata service")

    def via(self) -> tuple[bytes, bytes]:
        """The header by which a request is known that comes back to the sidecar that sent it."""
        return b"Via", f"1.1 {self._via}".encode("ascii")

    def _headers(self, request: Request) -> CIMultiDict[str]:
        # aiohttp loses the second of two headers that differ in casing only: one casing per name.
        casing: dict[bytes, str] = {}
        out: CIMultiDict[str] = CIMultiDict()
        out.add("Host", request.authority)
        for name, value in request.headers:
            out.add(casing.setdefault(name.lower(), name.decode("ascii")), value.decode("utf-8"))
        out.add("Via", f"1.1 {self._via}")
        if not request.body and request.method not in ("GET", "HEAD", "OPTIONS", "TRACE", "DELETE"):
            out["Content-Length"] = "0"
        return out

    def _session(self, name: str, *, fresh: bool) -> aiohttp.ClientSession:
        self._used[name] = time.monotonic()
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    force_close=fresh,
                    ssl=self._tls,
                    resolver=self._resolver,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                # Said, because an agent's sitecustomize (twiceshy started inside a run) changes the default.
                trust_env=False,
                skip_auto_headers=_AUTO_HEADERS,
                trace_configs=[_watched()],
                # The defaults cut: 300 s in all. Limits are our own, and named. connect: with the name's resolution.
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=self._settings.connect_timeout, sock_connect=None, sock_read=None
                ),
                max_line_size=_HEAD_LIMIT,
                max_field_size=_HEAD_LIMIT,
                max_headers=_HEADERS_LIMIT,
                middlewares=(_once,),
            )
        return session

    async def forget(self, idle: float) -> None:
        """Close the sessions of runs that sent nothing for *idle* seconds and have nothing out."""
        now = time.monotonic()
        for name, used in list(self._used.items()):
            session = self._sessions.get(name)
            connector = session.connector if session is not None else None
            busy = connector is not None and bool(getattr(connector, "_acquired", ()))
            if now - used > idle and not busy:
                del self._used[name]
                if self._sessions.pop(name, None) is not None and session is not None:
                    await session.close()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
