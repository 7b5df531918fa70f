"""What one client is given: an exchange under way, a recorded answer, or an answer of our own.

Each client is fed by its own request's task from what the exchange has released, so a slow one holds up
nobody. A cut answer reaches it as cut (the connection is aborted), never as complete. To a client that speaks
JSON-RPC, an answer that was made for another request is given with the names of its own (``proxy.mcp``).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from proxy import mcp, wire
from proxy.doors import Door
from proxy.incoming import Head
from proxy.mcp import Call, Text
from proxy.message import Headers
from proxy.recorder import Ending, Exchange
from proxy.refusals import PROBLEM, Refusal
from proxy.sse import Events
from proxy.wire import Framing
from runtime.entries import AnswerRow
from runtime.failpoints import reach
from runtime.step import Effect

#: Up to this much of a whole answer waits for its record, to go out with its end in one piece.
_ONE_PIECE = 32 << 10
#: So many writes are remembered before it is asked which of them were acknowledged.
_MARKS = 64
#: What is read through in one go takes some milliseconds, and the event loop waits for it.
_STRETCH = 64 << 10


@dataclass(slots=True)
class Client:
    """Who is answered, and how. ``call``: what its request is called in JSON-RPC, once that is known."""

    door: Door
    method: str
    http10: bool
    keep_alive: bool
    buffer: int
    record_wait: float
    xml: bool = False  # it reads no JSON
    call: Call | None = None

    def head(self, head: Head, kind: Framing, extra: Headers) -> bytes:
        """*head* as this client is given it."""
        return wire.head(head.status, head.reason, head.headers, kind, keep_alive=self.keep_alive, extra=extra)

    def framing(self, head: Head) -> Framing:
        return wire.framing(self.method, head.status, head.headers, http10=self.http10)

    def cut(self, kind: Framing) -> None:
        """End the connection so that an answer without its end is seen to be cut."""
        self.door.abort(reset=kind is Framing.CLOSE)


async def refuse(client: Client, refusal: Refusal) -> None:
    """Give *refusal* as the answer."""
    xml = client.xml and client.call is None
    head = Head(refusal.status, refusal.reason, refusal.headers(xml=xml))
    await _give_own(client, head, refusal.body(xml=xml))


async def _give_own(client: Client, head: Head, body: bytes, extra: Headers = ()) -> bool:
    """Give an answer of our own, problem JSON, as this client can read it."""
    if client.call is not None:
        headers, body = mcp.refused(client.call, head.headers, body)
        head = Head(200, b"OK", headers)
    return await give(client, Head(head.status, head.reason, (*head.headers, *extra)), body)


async def give(client: Client, head: Head, body: bytes) -> bool:
    """Give a small answer that is here whole; True when the client's kernel acknowledged it."""
    if body and wire.content_length(head.headers) is None:
        head = Head(head.status, head.reason, (*head.headers, (b"Content-Length", b"%d" % len(body))))
    kind = client.framing(head)
    out = client.head(head, kind, ())
    await client.door.room()  # who sends ahead and never reads must not fill our memory
    if kind is not Framing.NONE:
        out += wire.piece(body, kind)
    client.door.write(out + wire.end(kind))
    return await client.door.answered_whole()


async def replay(
    client: Client, row: AnswerRow, body: AsyncIterator[bytes] | bytes, extra: Headers, asked: Call | None = None
) -> bool:
    """Give a recorded answer, byte for byte; True when it was delivered whole (a cut one: as cut). Raises Unheard.

    *asked*: the call that it was made for, if that is known.
    """
    facts, door = row.facts, client.door
    head = Head(facts.status, facts.reason, facts.headers)
    if client.call is not None:
        # What a person said in an upstream's place is of our own, too, and no refusal.
        if facts.own and isinstance(body, bytes) and head.header(b"content-type") == PROBLEM:
            return await _give_own(client, head, body, extra)
        # Nobody is there to hear what this client would say to a request of the server's.
        headers, through = mcp.readdressed(head.headers, client.call, asked, exchange=None, heard=lambda _: True)
        if through is not None:
            body = led(through, body)
            if facts.whole and facts.body_id is None and wire.content_length(facts.headers) is not None:
                body = b"".join([data async for data in body])
                headers = (*headers, (b"Content-Length", b"%d" % len(body)))
        head = Head(head.status, head.reason, headers)
    kind = client.framing(head)
    out = client.head(head, kind, extra)
    await door.room()
    if isinstance(body, bytes):
        if kind is not Framing.NONE:
            out += wire.piece(body, kind)
    else:
        # The head goes out with the first piece: while that cannot be read, there is still a refusal to give.
        while (data := await door.heard(anext(body, None))) is not None:
            for offset in range(0, len(data), client.buffer):
                door.write(out + wire.piece(data[offset : offset + client.buffer], kind))
                out = b""
                await door.room()
            if door.gone:
                return False
    if facts.whole or kind is Framing.NONE:
        door.write(out + wire.end(kind))
        return await door.answered_whole()
    door.write(out)
    return await _cut_behind(client, kind)


async def led(through: Text | Events, body: AsyncIterator[bytes] | bytes) -> AsyncIterator[bytes]:
    """*body*, led through *through*."""
    pieces = _once(body) if isinstance(body, bytes) else body
    async for data in pieces:
        for at in range(0, len(data), _STRETCH):
            if out := through.feed(data[at : at + _STRETCH]):
                yield out
            await asyncio.sleep(0)
    if out := through.close():
        yield out


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _cut_behind(client: Client, kind: Framing) -> bool:
    """Cut an answer behind what came of it; True when the client had all of that."""
    delivered = await client.door.acknowledged(strictly=True)
    client.cut(kind)
    return delivered


async def relay(client: Client, exchange: Exchange, extra: Headers) -> bool:
    """Feed the client from *exchange* until its end; True when it was delivered whole (a cut one: as cut)."""
    feed = _Feed(client, exchange, extra)
    exchange.watch(feed.wake)
    client.door.watch(feed.wake)
    try:
        return await feed.run()
    finally:
        feed.note_delivered()
        exchange.unwatch(feed.wake)
        client.door.unwatch(feed.wake)


class _Feed:
    """One client's way through an answer under way."""

    def __init__(self, client: Client, exchange: Exchange, extra: Headers) -> None:
        self.wake = asyncio.Event()
        self._client = client
        self._exchange = exchange
        self._extra = extra
        self._kind = Framing.NONE
        self._head_sent = False
        self._through: Text | Events | None = None  # what the body is led through, on its way to this client
        self._offset = 0
        self._held = False  # only the end is left, and waits for the record
        self._deadline: float | None = None
        self._marks: deque[tuple[int, int, int]] = deque()  # of a read: place on the wire, in the body, length

    async def run(self) -> bool:
        exchange, door = self._exchange, self._client.door
        while not door.gone:
            ending = exchange.ending
            if ending is Ending.REFUSED and not self._head_sent and exchange.refusal is not None:
                await refuse(self._client, exchange.refusal)
                return False
            if ending is Ending.LOST and not self._head_sent:
                return False  # it may still be given what is due instead
            if ending in (Ending.REFUSED, Ending.LOST):
                self._client.cut(self._kind)
                return False
            answer = exchange.answer
            if ending is not None and not self._head_sent and answer.own and answer.head is not None:
                return await _give_own(self._client, answer.head, answer.spool.read(0, answer.spool.size), self._extra)
            before = self._offset
            out = self._next(ending)
            if self._head_sent and ending is not None and self._offset >= answer.spool.size:
                if self._through is not None:
                    out += wire.piece(self._through.close(), self._kind)
                if ending is Ending.CUT:
                    door.write(out)
                    return await _cut_behind(self._client, self._kind)
                door.write(out + wire.end(self._kind))
                return await door.answered_whole()
            if out:
                door.write(out)
            elif self._offset == before and not await self._woken():
                self._client.cut(self._kind)
        return False

    def _next(self, ending: Ending | None) -> bytes:
        """What may go out now, as it goes."""
        exchange, answer, out = self._exchange, self._exchange.answer, b""
        # The answer is whole and small, only its record is pending: head, body and end go out in one piece.
        soon = answer.whole and ending is None and answer.spool.size <= _ONE_PIECE
        if not self._head_sent and answer.head is not None:
            head, self._through = self._readdressed(answer.head)
            self._kind = self._client.framing(head)
            if ending is not None or not (soon or self._kind is Framing.NONE or self._is_empty(head)):
                out = self._client.head(head, self._kind, self._extra)
                self._head_sent = True
                exchange.note_head()
        count = min(answer.released - self._offset, self._client.buffer)
        held = answer.whole and ending is None and (soon or count <= 0)
        if held and not self._held:
            reach("end-held")
        self._held = held
        if self._head_sent and count > 0 and self._client.door.writable and (self._offset or not soon):
            count = count if self._through is None else min(count, _STRETCH)
            data = answer.spool.read(self._offset, count)
            piece = wire.piece(data if self._through is None else self._through.feed(data), self._kind)
            if exchange.effect is Effect.READ and self._through is None:
                self._mark(len(out) + (len(piece) - count - 2 if self._kind is Framing.CHUNKED else 0), count)
            out += piece
            self._offset += count
            exchange.note_first_byte()
        return out

    def _readdressed(self, head: Head) -> tuple[Head, Text | Events | None]:
        """*head* for this client, and what the body is to be led through."""
        exchange, call = self._exchange, self._client.call
        if call is None or exchange.call is None or call == exchange.call:
            return head, None
        headers, through = mcp.readdressed(
            head.headers,
            call,
            exchange.call,
            exchange=exchange.id,
            heard=lambda name: mcp.plain(name) in exchange.heard,
        )
        return Head(head.status, head.reason, headers), through

    def _is_empty(self, head: Head) -> bool:
        """The head is the end."""
        return self._kind is Framing.LENGTH and wire.content_length(head.headers) == 0

    async def _woken(self) -> bool:
        """Wait until there may be more to do; False: the end is held back, and the record does not come."""
        if self._held:
            loop = asyncio.get_running_loop()
            self._deadline = self._deadline or loop.time() + self._client.record_wait
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self.wake.wait()
            except TimeoutError:
                return False
        else:
            await self.wake.wait()
        self.wake.clear()
        return True

    # ---- how much of a read its client has had

    def _mark(self, ahead: int, length: int) -> None:
        self._marks.append((self._client.door.written + ahead, self._offset, length))
        if len(self._marks) >= _MARKS:
            self.note_delivered()

    def note_delivered(self) -> None:
        """Tell the exchange how much of the body this client's kernel has acknowledged."""
        if not self._marks:
            return
        acknowledged = self._client.door.written - self._client.door.unacknowledged()
        while self._marks and self._marks[0][0] < acknowledged:
            at, offset, length = self._marks[0]
            had = min(length, acknowledged - at)
            self._exchange.delivered = max(self._exchange.delivered, offset + had)
            if had < length:
                break
            self._marks.popleft()
