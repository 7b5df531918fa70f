"""TLS inside CONNECT: opened with a leaf of our own, so that what is inside can be journalled.

A client that does not trust the authority fails in the handshake and tells its program only "connection error": so
the failure is logged here, and kept for the run's summary, in words that say what to do.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable

from proxy.authority import Authority
from proxy.doors import Door
from proxy.identity import Tunnel
from runtime.errors import TwiceshyError

log = logging.getLogger("twiceshy.tunnels")
#: Seconds for a handshake.
HANDSHAKE = 20.0


class Tunnels:
    """Opens the TLS of tunnels. *failed*: told which tunnel's client did not trust the authority."""

    def __init__(self, authority: Authority, failed: Callable[[Tunnel, str], None]) -> None:
        self._authority = authority
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, door: Door, first: bytes) -> None:
        """Go on with *door*'s tunnel in a task; its transport has stopped reading."""
        task = asyncio.create_task(self._open(door, first), name="tls handshake")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, door: Door, first: bytes) -> None:
        transport, tunnel = door.transport, door.tunnel
        assert transport is not None
        assert tunnel is not None
        host = tunnel.target.host
        try:
            context = await self._authority.context(host)
        except (TwiceshyError, OSError) as error:
            log.exception("no certificate for %s", host)
            self._failed(tunnel, f"{host}: no certificate could be made: {error}")
            transport.abort()
            return
        if door.gone:
            return
        inner = door.inside()
        loop = asyncio.get_running_loop()
        started = asyncio.ensure_future(
            loop.start_tls(transport, inner, context, server_side=True, ssl_handshake_timeout=HANDSHAKE)
        )
        await asyncio.sleep(0)  # start_tls puts its protocol in place …
        loop.call_soon(_hand_over, transport, first)  # … and its connection_made stands before this in the queue
        try:
            tls = await started
        except (ssl.SSLError, OSError, TimeoutError) as error:
            words = f"{host}: this client does not trust the CA, or speaks no TLS that is offered ({error})"
            log.warning("%s; see `twiceshy env`", words)
            self._failed(tunnel, words)
            transport.abort()
            return
        if tls is None:
            return
        inner.connection_made(tls)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _hand_over(transport: asyncio.Transport, data: bytes) -> None:
    """Give the bytes that came with CONNECT's head to the TLS protocol that took its place."""
    protocol = transport.get_protocol()
    if isinstance(protocol, asyncio.BufferedProtocol):
        while data:
            buffer = memoryview(protocol.get_buffer(len(data)))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            protocol.buffer_updated(count)
            data = data[count:]
