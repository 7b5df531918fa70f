"""A gate between a sidecar and Postgres: it stands open, or refuses, or loses the answer to what it let through."""

import asyncio
from urllib.parse import urlsplit, urlunsplit


class Gate:
    """One sidecar's way to the database. Its methods are for the event loop that it lives in."""

    def __init__(self, dsn: str) -> None:
        self._parts = urlsplit(dsn)
        self._ends: set[_End] = set()
        self._server: asyncio.Server | None = None
        self.is_open = True
        self.losing = False
        self.dsn = ""

    async def start(self) -> None:
        """Find a port; ``dsn`` leads through it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, back=False), "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        user = self._parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(self._parts._replace(netloc=f"{user}@127.0.0.1:{port}"))

    def refuse(self) -> None:
        """From now on nobody gets through, and who was through is cut off."""
        self.is_open = False
        self.cut()

    def lose(self) -> None:
        """The next answer from Postgres does not arrive: what was asked may have been committed."""
        self.losing = True

    def let_in(self) -> None:
        """Be open again."""
        self.is_open, self.losing = True, False

    def cut(self) -> None:
        """Cut off everybody who is through."""
        for end in list(self._ends):
            end.cut()

    async def close(self) -> None:
        assert self._server is not None
        self.refuse()
        self._server.close()
        await self._server.wait_closed()

    async def _connect(self, client: "_End") -> None:
        """Connect *client* to Postgres."""
        host, port = self._parts.hostname or "127.0.0.1", self._parts.port or 5432
        try:
            _, server = await asyncio.get_running_loop().create_connection(lambda: _End(self, back=True), host, port)
        except OSError:
            client.cut()
            return
        client.pair(server)

    # ---- told by the ends

    def made(self, end: "_End") -> None:
        self._ends.add(end)
        if not self.is_open:
            end.cut()
        elif not end.back:
            end.connecting = asyncio.get_running_loop().create_task(self._connect(end))

    def lost(self, end: "_End") -> None:
        self._ends.discard(end)


class _End(asyncio.Protocol):
    """One end of a way through. *back*: the one at which Postgres is."""

    def __init__(self, gate: Gate, *, back: bool) -> None:
        self.back = back
        self.connecting: asyncio.Task[None] | None = None
        self._gate = gate
        self._other: _End | None = None
        self._transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._gate.made(self)

    def data_received(self, data: bytes) -> None:
        if self.back and self._gate.losing:
            self._gate.losing = False
            self.cut()
        elif self._other is None:
            self._early += data
        else:
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.lost(self)
        if self._other is not None:
            self._other.cut()

    def pair(self, other: "_End") -> None:
        self._other, other._other = other, self
        if self._transport is None or self._transport.is_closing():
            other.cut()
        else:
            other.write(self._early)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()
