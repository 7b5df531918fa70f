"""A TCP connection's way, in the hands of a test: slow, cut, deaf, or with an end that comes late.

``Cable(port)`` takes connections and passes them on to *port* of this machine. What is set holds for all connections,
also for those that are open. It runs in a thread of its own.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

PIECE = 16 << 10
PATIENCE = 20.0
_RESET = struct.pack("ii", 1, 0)


class Cable:
    """Use as a context manager. Attributes may be set at any time."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.target = port
        self.port = 0
        self.latency = 0.0  # seconds, each way
        self.end_delay = 0.0  # seconds that a FIN of the client travels longer than what came before it
        self.refusing = False  # new connections are reset
        self.hole = False  # nothing passes, neither way; nobody is told
        self.deaf = False  # nothing is taken from the far side: what it sends stays in its kernel
        self.cut_after: int | None = None  # so many bytes of the far side pass, then both ends are reset
        self.passed = 0  # bytes of the far side
        self._receive_buffer = receive_buffer
        self._ways: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def reset(self) -> None:
        """Both ends of every connection see a reset."""
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result(PATIENCE)

    async def _reset(self) -> None:
        for way in self._ways:
            way.cancel()
        if self._ways:
            await asyncio.wait(self._ways)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._taken, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = asyncio.current_task()
        assert way is not None
        self._ways.add(way)
        far: asyncio.StreamWriter | None = None
        try:
            if not self.refusing:
                far_reader, far = await self._connect()
                forth = asyncio.create_task(self._pass(reader, far, self._end_late))
                back = asyncio.create_task(self._pass(far_reader, writer, None))
                try:
                    await asyncio.gather(forth, back)
                    return
                finally:
                    forth.cancel()
                    back.cancel()
            _reset(writer)
        except (asyncio.CancelledError, OSError, _Cut):
            _reset(writer)
            if far is not None:
                _reset(far)
        finally:
            self._ways.discard(way)
            writer.close()
            if far is not None:
                far.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.setblocking(False)
        await self._loop.sock_connect(sock, ("127.0.0.1", self.target))
        return await asyncio.open_connection(sock=sock, limit=PIECE)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: Callable[[], float] | None
    ) -> None:
        """One direction, to its end. *late*: it is the client's."""
        while True:
            await self._while(lambda: self.hole or (late is None and self.deaf))
            data = await reader.read(PIECE)
            await self._while(lambda: self.hole)
            if self.latency:
                await asyncio.sleep(self.latency)
            if not data:
                break
            if late is None:
                if self.cut_after is not None and self.passed + len(data) >= self.cut_after:
                    writer.write(data[: max(0, self.cut_after - self.passed)])
                    await writer.drain()
                    raise _Cut
                self.passed += len(data)
            writer.write(data)
            await writer.drain()
        if late is not None:
            await asyncio.sleep(late())
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _while(self, condition: Callable[[], bool]) -> None:
        while condition():
            await asyncio.sleep(0.005)

    def _end_late(self) -> float:
        return self.end_delay


class _Cut(Exception):
    pass


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
