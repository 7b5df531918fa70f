"""Carries operations out: blocking in the calling thread, or awaited on its event loop. A thin shell.

Whatever is raised here is raised in the operation.

No wait has a time limit of its own, for a sleep may take days. It ends with its connection: the system asks an idle one
for a sign of life, a cancelled task closes its own.
"""

import functools
import inspect
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from twiceshy import quiet, wire
from twiceshy.errors import Stopped
from twiceshy.operation import PERMIT, Do, Never, Operation, Pause, Try

if TYPE_CHECKING:
    import ssl

P = ParamSpec("P")
T = TypeVar("T")
#: The longest that a connection may take to come about.
CONNECT = 10.0
_PIECE = 1 << 16


def blocking(operation: Callable[P, Operation[T]]) -> Callable[P, T]:
    """*operation*, carried out in the calling thread."""

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        steps = operation(*args, **kwargs)
        try:
            due = next(steps)
            while True:
                try:
                    came = _carry_out(due)
                except BaseException as error:
                    due = steps.throw(error)
                else:
                    due = steps.send(came)
        except StopIteration as end:
            result: T = end.value
            return result
        except Stopped:
            quiet.in_threads()
            raise
        finally:
            steps.close()

    return call


def awaited(operation: Callable[P, Operation[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """*operation*, awaited: other tasks go on meanwhile."""

    @functools.wraps(operation)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        import asyncio

        steps = operation(*args, **kwargs)
        try:
            due = next(steps)
            while True:
                try:
                    came = await _await(due)
                except BaseException as error:
                    due = steps.throw(error)
                else:
                    due = steps.send(came)
        except StopIteration as end:
            result: T = end.value
            return result
        except Stopped:
            quiet.on_loop(asyncio.get_running_loop())
            raise
        finally:
            steps.close()

    return call


@contextmanager
def _within(permit: Any) -> Iterator[None]:
    token = PERMIT.set(permit)
    try:
        yield
    finally:
        PERMIT.reset(token)


def _route(due: Try) -> wire.Route:
    return wire.route(due.ask, None if due.ask.direct else wire.proxy(), due.again)


def _tls() -> "ssl.SSLContext":
    import ssl

    return ssl.create_default_context()


# ---- blocking


def _carry_out(due: Try | Pause | Do | Never) -> Any:
    if isinstance(due, Try):
        return _ask(_route(due), due.ask.timeout)
    if isinstance(due, Pause):
        return time.sleep(due.seconds)
    if isinstance(due, Never):
        return None
    with _within(due.permit):
        value = due.work()
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("this function is asynchronous: await twiceshy.aio.step(…) does it")
    return value


def _ask(route: wire.Route, timeout: float | None) -> wire.Reply:
    line = socket.create_connection((route.host, route.port), timeout=CONNECT)
    try:
        _keep_alive(line)
        line.settimeout(timeout)
        if route.connect is not None:
            line.sendall(route.connect)
            head = b""
            while not wire.connected(head):
                if not (piece := line.recv(_PIECE)):
                    raise wire.Cut("the proxy hung up")
                head += piece
        if route.tls is not None:
            line = _tls().wrap_socket(line, server_hostname=route.tls)
        line.sendall(route.data)
        pieces = []
        while piece := line.recv(_PIECE):
            pieces.append(piece)
        return wire.reply(b"".join(pieces))
    finally:
        line.close()


def _keep_alive(line: socket.socket) -> None:
    """Have a peer that is gone without a word found out within a minute."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- awaited


async def _await(due: Try | Pause | Do | Never) -> Any:
    import asyncio

    if isinstance(due, Try):
        return await _ask_awaited(_route(due), due.ask.timeout)
    if isinstance(due, Pause):
        return await asyncio.sleep(due.seconds)
    if isinstance(due, Never):
        return await asyncio.get_running_loop().create_future()
    with _within(due.permit):
        if inspect.iscoroutinefunction(due.work):
            async with asyncio.timeout(due.timeout):
                return await due.work()
        # A function that blocks must not stop the loop; its time limit is the sidecar's business, for no thread can
        # be ended.
        value = await asyncio.to_thread(due.work)
        if inspect.isawaitable(value):
            async with asyncio.timeout(due.timeout):
                return await value
        return value


async def _ask_awaited(route: wire.Route, timeout: float | None) -> wire.Reply:
    import asyncio

    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(route.host, route.port)
        _keep_alive(writer.get_extra_info("socket"))
        async with asyncio.timeout(timeout):
            if route.connect is not None:
                writer.write(route.connect)
                head = b""
                while not wire.connected(head):
                    if not (piece := await reader.read(_PIECE)):
                        raise wire.Cut("the proxy hung up")
                    head += piece
            if route.tls is not None:
                await writer.start_tls(_tls(), server_hostname=route.tls)
            writer.write(route.data)
            return wire.reply(await reader.read(-1))
    finally:
        if writer is not None:
            writer.transport.abort()
