"""What an agent says to a server of MCP that asked it something within an answer: led to who waits for it.

An answer may be given to another attempt than the one that it was made for, whose client is in a session of its own:
there, nobody waits for its word. And what was responded to once is asked nobody again.
"""

from proxy import mcp
from proxy.message import Request
from proxy.recorder import Exchange
from proxy.run import Run


class Response:
    """A response on its way. ``request``: as it is to be passed on."""

    def __init__(self, run: Run, request: Request, identifier: bytes) -> None:
        to = mcp.through(identifier)
        session = request.header("mcp-session-id")
        self._name = mcp.plain(identifier if to is None else to.id)
        self._exchanges = [
            each
            for each in run.exchanges.values()
            if (_session(each) == session if to is None else each.id == to.exchange)
        ]
        self.request = request
        if to is not None and self._exchanges:
            self.request = mcp.led_back(request, to, _session(self._exchanges[0]))

    def arrived(self, status: int) -> None:
        """The server has answered it with *status*."""
        if 200 <= status < 300:
            for each in self._exchanges:
                each.heard.add(self._name)


def _session(exchange: Exchange) -> bytes | None:
    return None if exchange.call is None else exchange.call.session
