"""What is inside CONNECT: its TLS is opened with a leaf of our own, so that it can be journalled; or it passes blind.

A client that does not trust the authority fails in the handshake and tells its program only "connection error": so
the failure is logged here, and kept for the run's summary, in words that say what to do.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from proxy.authority import Authority
from proxy.doors import Door
from proxy.hello import Hello
from proxy.identity import Tunnel
from proxy.refusals import http2_only
from runtime.errors import TwiceshyError

log = logging.getLogger("twiceshy.tunnels")
#: Seconds for a handshake.
HANDSHAKE = 20.0
CURE = " does not trust the CA (`twiceshy run` and `twiceshy env` set what it needs; `twiceshy ca` shows the file)"
UNUSED = "this client hung up right after the TLS handshake: perhaps it" + CURE
#: What clients say of a certificate that they do not trust, as OpenSSL calls it.
_DISTRUST = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED", "UNSUPPORTED_CERTIFICATE")


class Tunnels:
    """Goes on with tunnels that were begun. *failed*: told in which one TLS cannot be spoken, and why.

    *is_blind*: those that *pass_through* serves.
    """

    def __init__(
        self, authority: Authority, failed: Callable[[Tunnel, str], None], is_blind: Callable[[Tunnel], bool],
        pass_through: Callable[[Door], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._authority = authority
        self._failed = failed
        self._is_blind = is_blind
        self._pass_through = pass_through
        self._tasks: set[asyncio.Task[None]] = set()

    def begun(self, door: Door) -> bool:
        """Go on with *door*'s tunnel in a task, if it is not to be opened."""
        assert door.tunnel is not None
        blind = self._is_blind(door.tunnel)
        if blind:
            self._begin(self._blind(door), "tunnel")
        return blind

    def open(self, door: Door, first: bytes, hello: Hello) -> None:
        """Go on with *door*'s tunnel in a task; its transport has stopped reading."""
        self._begin(self._open(door, first, hello), "tls handshake")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _blind(self, door: Door) -> None:
        try:
            await self._pass_through(door)
        except Exception:
            log.exception("a tunnel failed")
            door.abort(reset=True)

    async def _open(self, door: Door, first: bytes, hello: Hello) -> None:
        transport, tunnel = door.transport, door.tunnel
        assert transport is not None
        assert tunnel is not None
        try:
            context = await self._authority.context(tunnel.target.host, hello.name)
        except Exception as error:  # whatever it is, a client must not wait for it
            if not isinstance(error, TwiceshyError | OSError | ValueError):
                log.exception("no certificate for %a", tunnel.target.host)
            self._tell(tunnel, f"no certificate could be made: {error}")
            transport.abort()
            return
        if transport.is_closing():
            return
        deaf = hello.http2_only and not self._is_blind(tunnel)
        if deaf:
            self._tell(tunnel, http2_only(tunnel.target.host, tunnel.target.port, "this client"))
        inner = door.inside()
        loop = asyncio.get_running_loop()
        started = asyncio.ensure_future(
            loop.start_tls(transport, inner, context, server_side=True, ssl_handshake_timeout=HANDSHAKE)
        )
        await asyncio.sleep(0)  # start_tls puts its protocol in place …
        loop.call_soon(_hand_over, transport, first)  # … and its connection_made stands before this in the queue
        try:
            tls = await started
        except (ssl.SSLError, OSError) as error:
            if not deaf:
                self._tell(tunnel, "this client " + _why(error))
            transport.abort()
            return
        if not deaf:
            inner.on_unused = lambda: self._tell(tunnel, UNUSED)
        if tls is None or tls.is_closing():
            inner.connection_lost(None)  # the loop has said so before there was anybody to hear it
        else:
            inner.connection_made(tls)

    def _tell(self, tunnel: Tunnel, what: str) -> None:
        # A host is what a client said: nothing that moves a terminal's cursor, and no book.
        words = f"{ascii(tunnel.target.host)[1:-1][:200]}: {what[:400]}"
        log.warning("run %s: %s", tunnel.named.run if tunnel.named is not None else "?", words)
        self._failed(tunnel, words)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _why(error: ssl.SSLError | OSError) -> str:
    reason = getattr(error, "reason", None) or ""
    if any(said in reason for said in _DISTRUST):
        return CURE.lstrip()
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionAbortedError):
        return "hung up in the TLS handshake: perhaps it" + CURE
    return f"did not come through the TLS handshake ({reason.replace('_', ' ').lower() or error})"


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
