"""An upstream that answers at once: 400 bytes of JSON, or two events stamped with the moment they were sent.

Prints its port on a line of its own. A process of its own, so that it does not share the bench's event loop.
"""

import asyncio
import sys
import time

ANSWER = b'{"text": "' + b"x" * 388 + b'"}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Stub(asyncio.Protocol):
    """Answers each request as soon as it is here whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._pending = b""

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while b"\r\n\r\n" in self._pending:
            head, _, rest = self._pending.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
            )
            if len(rest) < length:
                return
            self._pending = rest[length:]
            if b"/stream" in head.partition(b"\r\n")[0]:
                self._stream()
            else:
                self._transport.write(PLAIN)

    def _stream(self) -> None:
        self._transport.write(STREAM)
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, self._event)
        loop.call_later(0.03, self._event)
        loop.call_later(0.05, lambda: self._transport.write(b"0\r\n\r\n"))

    def _event(self) -> None:
        event = b"data: %d\n\n" % time.monotonic_ns()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))


async def main() -> None:
    """Serve until standard input closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stub, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
