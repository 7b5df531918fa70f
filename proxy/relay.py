"""What one client is given: an exchange under way, a recorded answer, or an answer of our own.

Each client is fed by its own request's task from what the exchange has released, so a slow one holds up
nobody. A cut answer reaches it as cut (the connection is aborted), never as complete.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from proxy import wire
from proxy.doors import Door
from proxy.message import Headers
from proxy.recorder import Ending, Exchange, Head
from proxy.refusals import Refusal
from proxy.wire import Framing
from runtime.entries import AnswerRow
from runtime.step import Effect

#: Up to this much of a whole answer waits for its record, to go out with its end in one piece.
_ONE_PIECE = 32 << 10
#: How long the rest of a cut answer may take to reach the client before the connection is aborted.
_FLUSH = 5.0


@dataclass(frozen=True, slots=True)
class Client:
    """Who is answered, and how."""

    door: Door
    method: str
    http10: bool
    keep_alive: bool
    buffer: int
    record_wait: float


async def refuse(client: Client, refusal: Refusal) -> None:
    """Give *refusal* as the answer."""
    await give(client, Head(refusal.status, refusal.reason, refusal.headers()), refusal.body())


async def give(client: Client, head: Head, body: bytes, extra: Headers = ()) -> bool:
    """Give a small answer that is here whole; True when the client's kernel acknowledged it."""
    headers = head.headers
    if wire.content_length(headers) is None and not _has(headers, b"transfer-encoding") and body:
        headers = (*headers, (b"Content-Length", b"%d" % len(body)))
    kind = wire.framing(client.method, head.status, headers, http10=client.http10)
    out = wire.head(head.status, head.reason, headers, kind, keep_alive=client.keep_alive, extra=extra)
    if kind is not Framing.NONE:
        out += wire.piece(body, kind) + wire.end(kind)
    client.door.write(out)
    return await client.door.answered_whole()


async def replay(client: Client, row: AnswerRow, body: AsyncIterator[bytes] | bytes, extra: Headers) -> bool:
    """Give a recorded answer, byte for byte; True when it was delivered whole (a cut one: as cut)."""
    facts = row.facts
    door = client.door
    kind = wire.framing(client.method, facts.status, facts.headers, http10=client.http10)
    out = wire.head(facts.status, facts.reason, facts.headers, kind, keep_alive=client.keep_alive, extra=extra)
    if isinstance(body, bytes):
        if kind is not Framing.NONE:
            out += wire.piece(body, kind) + (wire.end(kind) if facts.whole else b"")
        door.write(out)
    else:
        door.write(out)
        wake = asyncio.Event()
        door.watch(wake)
        try:
            async for data in body:
                for offset in range(0, len(data), client.buffer):
                    door.write(wire.piece(data[offset : offset + client.buffer], kind))
                    while not door.writable and not door.gone:
                        await wake.wait()
                        wake.clear()
                if door.gone:
                    return False
        finally:
            door.unwatch(wake)
        if facts.whole:
            door.write(wire.end(kind))
    delivered = await door.answered_whole()
    if not facts.whole and kind is not Framing.NONE:
        door.abort()
        return True
    return delivered


async def relay(client: Client, exchange: Exchange, extra: Headers) -> bool:
    """Feed the client from *exchange* until its end; True when it was delivered whole (a cut one: as cut)."""
    wake = asyncio.Event()
    exchange.watch(wake)
    client.door.watch(wake)
    try:
        return await _feed(client, exchange, extra, wake)
    finally:
        exchange.unwatch(wake)
        client.door.unwatch(wake)


async def _feed(client: Client, exchange: Exchange, extra: Headers, wake: asyncio.Event) -> bool:
    door = client.door
    sent_head = False
    offset = 0
    kind = Framing.NONE
    while not door.gone:
        ending, head = exchange.ending, exchange.head
        if ending in (Ending.REFUSED, Ending.LOST):
            if ending is Ending.REFUSED and not sent_head and exchange.refusal is not None:
                await refuse(client, exchange.refusal)
                return False
            break
        out = b""
        if head is not None and not sent_head:
            kind = wire.framing(client.method, head.status, head.headers, http10=client.http10)
            if ending is not None or (kind is not Framing.NONE and not _soon(exchange)):
                out = wire.head(head.status, head.reason, head.headers, kind, keep_alive=client.keep_alive, extra=extra)
                sent_head = exchange.heard = True
        if sent_head and door.writable:
            count = min(exchange.released - offset, client.buffer)
            if count > 0 and (ending is not None or offset or not _soon(exchange)):
                out += wire.piece(exchange.spool.read(offset, count), kind)
                offset += count
                exchange.note_first_byte()
            if ending is Ending.WHOLE and offset >= exchange.spool.size:
                door.write(out + (wire.end(kind) if kind is not Framing.NONE else b""))
                return await _delivered(client, exchange)
            if ending is Ending.CUT and offset >= exchange.spool.size:
                door.write(out)
                await door.acknowledged(_FLUSH)
                break
        if out:
            door.write(out)
            if exchange.effect is Effect.READ:
                exchange.delivered = max(exchange.delivered, offset - door.unacknowledged())
            continue
        if not await _woken(wake, client.record_wait if exchange.whole and ending is None else None):
            break
    cut = exchange.ending is Ending.CUT and not door.gone
    if not door.gone:
        door.abort()
    return cut


def _soon(exchange: Exchange) -> bool:
    """The answer is whole and small, only its record is pending: head, body and end go out in one piece."""
    return exchange.whole and exchange.ending is None and exchange.spool.size <= _ONE_PIECE


async def _woken(wake: asyncio.Event, limit: float | None) -> bool:
    try:
        async with asyncio.timeout(limit):
            await wake.wait()
    except TimeoutError:
        return False
    wake.clear()
    return True


async def _delivered(client: Client, exchange: Exchange) -> bool:
    delivered = await client.door.answered_whole()
    if exchange.effect is Effect.READ:
        exchange.delivered = exchange.spool.size
    return delivered


def _has(headers: Headers, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in headers)
