"""Passes requests on to another stand-in on this machine, and counts what had an effect there.

So that a server which is somebody else's (an emulator of a cloud, say) has the sandbox's TLS, log and faults.
``/NAME/…`` goes to ``URL/…``; the ``Host`` stays the client's.
"""

import http.client
from urllib.parse import urlsplit

from sandbox.answer import Answer, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked

#: Whose answers are soon here: it is asked on the event loop.
PATIENCE = 10.0
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding", b"expect"})
_OWN = frozenset({"connection", "content-length", "content-type", "date", "transfer-encoding"})


class Passed(Service):
    """One such server. Every request to it that succeeded, but for GET and HEAD, is an effect."""

    def __init__(self, ledger: Ledger, name: str, url: str) -> None:
        super().__init__(ledger)
        self.name = name
        self._to = urlsplit(url).netloc

    def act(self, asked: Asked, number: int) -> Answer:
        connection = http.client.HTTPConnection(self._to, timeout=PATIENCE)
        try:
            connection.putrequest(
                asked.method, asked.target.removeprefix(f"/{self.name}") or "/",
                skip_host=True, skip_accept_encoding=True,
            )  # fmt: skip
            for name, value in asked.headers:
                if name.lower() not in _FRAMING:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(asked.body)))
            connection.endheaders(asked.body)
            got = connection.getresponse()
            body = got.read()
        except (OSError, http.client.HTTPException) as error:
            return of_json(502, {"error": f"{self._to}: {error!r}"})
        finally:
            connection.close()
        if asked.method not in ("GET", "HEAD") and got.status < 300:
            what = asked.header("x-amz-target") or f"{asked.method} {asked.path}"
            self.ledger.effect(self.name, what, number, made=str(got.status))
        headers = tuple((name, value) for name, value in got.getheaders() if name.lower() not in _OWN)
        return Answer(got.status, (body,), headers, got.getheader("Content-Type", "application/octet-stream"))
