"""The upstream: it logs what it receives, does it when it is told to, and answers as it is told to.

It is honest: under one key an effect is made once, for as long as a key is remembered, and is answered as it was
first. What it may not receive it notes among its ``wrongs``: a key with other bytes, a request without its intent.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import asyncpg

from runtime.step import Effect

#: How long a key is remembered, in seconds; what the sidecar is told of it.
REMEMBERS = 300.0
#: The paths, and what may be done again there. A mail goes to where no rule knows anything.
KINDS = {
    "read": Effect.READ,
    "call": Effect.REPEATABLE,
    "stream": Effect.REPEATABLE,
    "order": Effect.IDEMPOTENT,
    "charge": Effect.IDEMPOTENT,  # its SDK makes up a key for each call, and keeps it over retries
    "mail": Effect.AT_MOST_ONCE,
}
_KEY = {"in": "header", "name": "Idempotency-Key", "retention": REMEMBERS}
RULES: list[dict[str, Any]] = [
    {"host": "*", "path": "/read/**", "methods": ["GET"], "effect": "read"},
    {"host": "*", "path": ["/call/**", "/stream/**"], "effect": "repeatable", "dialect": "openai_chat",
     "ignore": ["$.attempt"]},
    {"host": "*", "path": "/order/**", "effect": "idempotent", "key": _KEY, "ignore": ["$.attempt"]},
    {"host": "*", "path": "/charge/**", "effect": "idempotent", "key": {**_KEY, "sdk": "random_per_call"},
     "ignore": ["$.attempt"]},
]  # fmt: skip
#: How much there is in answers that are called big: more than the kernels take when the client does not read.
_MANY = 40_000
_WITNESS = "SELECT state FROM twiceshy.step WHERE run_id = $1 AND url = $2"


class Fate(Enum):
    """What becomes of a request."""

    OK = "done, 200"
    HALF = "done, 200, but only half of it yet"
    FAILED = "done, 503"
    BUSY = "not done, 503"
    LIMITED = "not done, 429"
    LOST = "done, the connection cut"
    DROPPED = "not done, the connection cut"
    CUT = "done, half of the answer, the connection cut"

    @property
    def does(self) -> bool:
        return self not in (Fate.BUSY, Fate.LIMITED, Fate.DROPPED)

    @property
    def settles(self) -> bool:
        """The sidecar is given a whole answer that is final, unless it is a mail's."""
        return self is Fate.OK


@dataclass(eq=False)
class Received:
    """One request that came. Who caused it is read from its credentials, which are always the asker's."""

    n: int
    kind: str
    run: str
    name: str
    attempt: int
    call: int
    key: str | None
    body: bytes
    line: "_Line"
    fate: Fate | None = None
    effect: int | None = None  # what was done
    answered: bytes = b""  # the whole body, as it was or would have been sent
    begun: bool = False  # half of it was sent

    @property
    def open(self) -> bool:
        """It was not decided, or only half."""
        return self.fate is None or self.fate is Fate.HALF

    @property
    def gone(self) -> bool:
        """Whoever sent it is gone."""
        return self.line.gone

    def __str__(self) -> str:
        fate = self.fate.value if self.fate else "open"
        return f"#{self.n} {self.kind}/{self.name} of {self.run} attempt {self.attempt} call {self.call}: {fate}"


@dataclass
class Judge:
    """Lives in one event loop; *tell* is called whenever there is news."""

    dsn: str
    now: Callable[[], float]
    tell: Callable[[], None]
    log: list[Received] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._always: Fate | None = None
        self._count = 0
        self._made = 0
        self._keys: dict[str, tuple[float, int]] = {}  # when first done, and the effect
        self._bodies: dict[str, tuple[bytes, str]] = {}
        self._witness: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._witness = await asyncpg.connect(self.dsn)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Line(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        assert self._witness is not None
        self._server.close()
        await self._server.wait_closed()
        await self._witness.close()

    def forget(self) -> None:
        """A new example begins."""
        self._always = None
        self.log.clear()
        self.wrongs.clear()
        self._keys.clear()
        self._bodies.clear()

    def url(self, kind: str, run: str, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{kind}/{run}/{name}"

    def of(self, run: str, kind: str | None = None, name: str | None = None) -> list[Received]:
        """What came of *run*."""
        return [
            each for each in self.log if each.run == run and kind in (None, each.kind) and name in (None, each.name)
        ]

    # ---- receiving

    def take(self, line: "_Line", path: str, headers: dict[str, str], body: bytes) -> None:
        """A request is here."""
        _, kind, run, name = path.split("/")
        attempt, call = map(int, headers["authorization"].removeprefix("Bearer ").split("/"))
        self._count += 1
        received = Received(self._count, kind, run, name, attempt, call, headers.get("idempotency-key"), body, line)
        line.received = received
        if any(each.startswith(("twiceshy", "proxy-")) for each in headers):
            self.wrongs.append(f"{received}: it carries {sorted(headers)}")
        self._spawn(self._log(received))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _log(self, received: Received) -> None:
        assert self._witness is not None
        async with self._lock:
            url = self.url(received.kind, received.run, received.name)
            states = [row["state"] for row in await self._witness.fetch(_WITNESS, received.run, url)]
        if received.kind != "read" and "sent" not in states:
            self.wrongs.append(f"{received}: it came without an intent, its steps are {states}")
        if KINDS[received.kind].is_effect and received.key is None:
            self.wrongs.append(f"{received}: it came without a key")
        if received.key is not None:
            first = self._bodies.setdefault(received.key, (received.body, f"{received.run}/{received.name}"))
            if first != (received.body, f"{received.run}/{received.name}"):
                self.wrongs.append(f"{received}: its key came before, with {first}, and now {received.body!r}")
        self.log.append(received)
        if self._always is not None:
            self.decide(received, self._always)
        self.tell()

    # ---- deciding

    def decide(self, received: Received, fate: Fate) -> None:
        """Let *fate* befall *received*; of one that was half answered only a whole or a cut answer can become."""
        assert received.open
        begun = received.begun
        if begun:
            fate = Fate.OK if fate in (Fate.OK, Fate.HALF) else Fate.CUT
        received.fate = fate
        if fate.does and received.effect is None:
            received.effect = self._do(received)
        if fate.does and not received.answered:
            received.answered = _body(received)
        line, wire = received.line, b""
        if fate in (Fate.FAILED, Fate.BUSY, Fate.LIMITED):
            status = b"429 Too Many Requests" if fate is Fate.LIMITED else b"503 Service Unavailable"
            words = b'{"error":"%s %d"}' % (fate.name.lower().encode(), received.n)
            received.answered = words
            wire = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(words))
            line.write(wire + words)
            return
        if fate in (Fate.OK, Fate.HALF, Fate.CUT):
            first, rest = _wire(received)
            if not begun:
                line.write(first)
                received.begun = True
            if fate is Fate.OK:
                line.write(rest)
        if fate in (Fate.LOST, Fate.DROPPED, Fate.CUT):
            line.cut()

    def answer_all(self, fate: Fate) -> None:
        """From now on decide at once, and on all that is open."""
        self._always = fate
        for received in self.log:
            if received.open:
                self.decide(received, fate)

    def _do(self, received: Received) -> int:
        self._made += 1
        if KINDS[received.kind] is not Effect.IDEMPOTENT or received.key is None:
            return self._made
        at, effect = self._keys.get(received.key, (self.now(), self._made))
        if self.now() - at > REMEMBERS:
            at, effect = self.now(), self._made
        self._keys[received.key] = at, effect
        return effect


def _body(received: Received) -> bytes:
    pad = "x" * (_MANY if received.name.startswith("big") else 20)
    told: dict[str, Any] = {"effect": received.effect, "name": received.name, "run": received.run, "pad": pad}
    if received.kind == "stream":
        events = [{"choices": [{"delta": {"content": json.dumps(told)}}]}, {"choices": [{"finish_reason": "stop"}]}]
        return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"
    if received.kind == "call":
        told["choices"] = [{"message": {"content": "hello"}, "finish_reason": "stop"}]
    return json.dumps(told).encode()


def _wire(received: Received) -> tuple[bytes, bytes]:
    """The answer, in two parts."""
    body = received.answered
    half = len(body) // 2
    if received.kind == "stream":
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        half = body.index(b"\n\n") + 2
        return head + _chunk(body[:half]), _chunk(body[half:]) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body[:half], body[half:]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, judge: Judge) -> None:
        self.gone = False
        self.received: Received | None = None
        self._judge = judge
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, whole, rest = self._data.partition(b"\r\n\r\n")
        if not whole:
            return
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        length = int(headers.get("content-length", "0"))
        if len(rest) >= length:
            self._data = rest[length:]
            self._judge.take(self, line.split()[1], headers, rest[:length])

    def eof_received(self) -> None:
        self._lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        self.gone = True
        self._judge.tell()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.gone:
            self._transport.write(data)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()
