"""WebSockets: the handshake goes upstream as it came, and where it is accepted, both directions pass as they come.

What is said in a WebSocket is no request with an answer, so nothing of it is journalled: it happens again with each
attempt. Whose it is and where it goes is asked like for any request.
"""

import asyncio

from aiohttp import web

from proxy.attempts import Attempts
from proxy.identity import Target
from proxy.message import Request
from proxy.passage import Passage, Reader
from proxy.refusals import Refusal, http2_only
from proxy.relay import Client
from proxy.run import Run
from proxy.upgrade import SWITCHED, Answer, Extent, Malformed, is_http2, read_answer, request_head
from proxy.upstream import PIECE, Denied, NotSent, Upstream
from runtime.settings import Settings


class _Ahead:
    """What came of a client behind its request, as aiohttp hands it over."""

    def __init__(self) -> None:
        self.data = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        pass


class WebSockets:
    """Serves handshakes. One per sidecar."""

    def __init__(self, upstream: Upstream, attempts: Attempts, settings: Settings) -> None:
        self._upstream = upstream
        self._attempts = attempts
        self._settings = settings

    async def answer(
        self, http: web.BaseRequest, target: Target, request: Request, client: Client, run: Run | None
    ) -> Refusal | None:
        """Serve *request* to its WebSocket's end; the refusal to give, or None when an answer was given."""
        try:
            self._upstream.check(request)
            answers, upstream = await self._upstream.open(target.host, target.port, tls=target.scheme == "https")
        except Denied as error:
            return Refusal("denied", f"{error}. Nothing was sent.")
        except NotSent as error:
            return Refusal("upstream", f"{target.shown}: {error}. Nothing was sent.")
        door, ahead = client.door, _Ahead()
        assert http.protocol is not None
        http.protocol.set_parser(ahead)  # type: ignore[arg-type]  # as aiohttp's own WebSockets do
        with Passage(self._attempts, self._settings, run, target, "WebSocket", door, upstream) as passage:
            sent = door.pass_through(ahead.data)
            leaving = asyncio.create_task(passage.leave_with_client())
            try:
                if not await passage.may_go():
                    return None
                upstream.write(request_head(request, self._upstream.via()))
                answer = await self._answered(target, answers)
                if isinstance(answer, Refusal):
                    return answer
                if answer.status != SWITCHED:
                    if run is not None:
                        run.count(target, "passthrough")
                    await self._give(client, answer, answers)
                    return None
            finally:
                leaving.cancel()
            door.write(answer.raw)
            await passage.carry(sent, answers)
        return None

    async def _answered(self, target: Target, answers: Reader) -> Answer | Refusal:
        """The head of the upstream's answer, behind such as only announce one."""
        limit = self._settings.first_byte_timeout
        try:
            async with asyncio.timeout(limit):
                while True:
                    first = await answers.readexactly(len(b"HTTP/1.1 "))
                    if is_http2(first):
                        return _failed(target, http2_only(target.host, target.port, target.shown))
                    answer = read_answer(first + await answers.readuntil(b"\r\n\r\n"))
                    if answer.status >= 200 or answer.status == SWITCHED:
                        return answer
        except TimeoutError:
            return _failed(target, f"no answer within {limit:g} s (first_byte_timeout)", "upstream-timeout")
        except asyncio.LimitOverrunError:
            return _failed(target, f"the head of the answer is larger than {PIECE} bytes")
        except (OSError, EOFError, Malformed) as error:
            return _failed(target, str(error) or type(error).__name__)

    async def _give(self, client: Client, answer: Answer, answers: Reader) -> None:
        """Give an answer that opens no WebSocket, and end with it."""
        extent, door = Extent(answer), client.door
        door.write(answer.closing())
        try:
            while not extent.over and not door.gone:
                async with asyncio.timeout(self._settings.silence_timeout):
                    data = await answers.read(PIECE)
                if not data and extent.by_close:
                    return
                if not data:
                    break
                door.write(extent.take(data))
                await door.room()
        except (OSError, Malformed):
            pass
        if not extent.over:
            door.abort(reset=True)


def _failed(target: Target, words: str, code: str = "upstream") -> Refusal:
    return Refusal(code, f"{target.shown}: {words}. The request was sent.")
