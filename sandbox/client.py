"""A typed client of the sandbox, for tests and the demo. Standard library only; no proxy, ever.

with Sandbox.start(tmp_path / "sandbox.log") as sandbox:
    sandbox.fault(match={"path": "/payments/*"}, hold="refund")
    ...
    sandbox.wait_held("refund")
    sandbox.release("refund")
    assert sandbox.counts() == {"payments": 1}
"""

import base64
import json
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from sandbox.tls import CA, ensure

T = TypeVar("T")
PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Received:
    """One request as the sandbox received it."""

    n: int  # serial number, from 1; the answer carries it as Sandbox-Serial
    at: float
    service: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]  # as they came; values are latin-1
    body: bytes  # at most the first MiB; ``size`` and ``sha256`` are of the whole
    size: int
    sha256: str
    whole: bool  # False: the client went before the body was complete
    connection: int  # number of the connection
    turn: int  # the how-manieth request of that connection
    gone: float | None = None  # when the client went before the answer's end
    end: str | None = None  # answered, dropped, cut, gone; None: still in progress
    status: int | None = None
    sent: int | None = None  # bytes of the answer, head included

    def header(self, name: str) -> str | None:
        """The first value of header *name* in any casing, or None."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing that really happened."""

    n: int  # the request that made it
    at: float
    service: str
    effect: str  # refund, order, note, mail, completion, or the method on /any
    id: str
    key: str | None
    sha256: str  # of the request's body
    facts: dict[str, Any] = field(default_factory=dict)


class Sandbox:
    """A running sandbox at *url*; ``start`` runs one as a process of its own, gone with its caller."""

    def __init__(
        self,
        url: str,
        process: "subprocess.Popen[bytes] | None" = None,
        log: Path | None = None,
        ca: Path | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.process = process
        self.log = log
        self.ca = ca  # to be trusted by who calls it
        context = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))

    @classmethod
    def start(
        cls, log: Path, *, seed: int = 0, port: int = 0, host: str = "127.0.0.1", tls: Path | None = None,
        passed: Mapping[str, str] | None = None,
    ) -> Self:  # fmt: skip
        """Start ``python -m sandbox`` and wait until it listens.

        *tls*: the folder of its certificates (https). *passed*: names, and whom their requests are passed on to.
        """
        command = [sys.executable, "-m", "sandbox", "--stdin-lifetime", "--host", host]
        command += ["--port", str(port), "--log", str(log.resolve()), "--seed", str(seed)]
        command += [word for name, url in (passed or {}).items() for word in ("--pass-on", f"{name}={url}")]
        ca = None
        if tls is not None:
            ca = ensure(tls) / CA
            command += ["--tls", str(tls.resolve())]
        # A session of its own: the terminal's Ctrl-C is its starter's to handle.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT, start_new_session=True
        )
        started = cls(f"{'http' if tls is None else 'https'}://{host}", process, log, ca)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the sandbox did not start (exit code {process.wait()})")
            started.url += f":{json.loads(line)['port']}"
        except BaseException:
            started.stop()
            raise
        return started

    def stop(self) -> None:
        """End the process that ``start`` started, at once: what it said is on the disk."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    # ---- faults

    def fault(self, **fault: Any) -> None:
        """Set one fault, see ``sandbox.faults``: match, nth, times, delay, status, drop, hold, hold_events, …"""
        self._ask("POST", "/faults", fault)

    def faults(self, *faults: dict[str, Any]) -> None:
        """Set several faults in this order."""
        self._ask("POST", "/faults", list(faults))

    def clear(self) -> None:
        """Forget all faults and open all gates."""
        self._ask("DELETE", "/faults")

    def release(self, *names: str) -> None:
        """Open these gates."""
        for name in names:
            self._ask("POST", "/release", {"name": name})

    def waiting(self, name: str) -> int:
        """How many requests wait at the gate *name*."""
        return int(self._ask("GET", "/gates").get(name, 0))

    def wait_held(self, name: str, count: int = 1, *, timeout: float = 20.0) -> None:
        """Wait until *count* requests wait at the gate *name*."""
        self.wait_for(lambda: self.waiting(name) >= count, timeout=timeout, what=f"{count} waiting at {name}")

    # ---- what happened

    def counts(self) -> dict[str, int]:
        """Effects by service; a service without any is missing."""
        return {name: int(count) for name, count in self._ask("GET", "/counts")["effects"].items()}

    def count(self, service: str) -> int:
        """How many effects *service* had."""
        return self.counts().get(service, 0)

    def requests(
        self, service: str | None = None, *, method: str | None = None, path: str | None = None
    ) -> list[Received]:
        """The requests received, in order, of one service, method, path."""
        received = []
        for record in self._ask("GET", "/requests"):
            values = {name: value for name, value in record.items() if name != "kind"}
            values["headers"] = tuple((name, value) for name, value in record["headers"])
            values["body"] = base64.b64decode(record["body"])
            received.append(Received(**values))
        return [
            each
            for each in received
            if service in (None, each.service) and method in (None, each.method) and path in (None, each.path)
        ]

    def hits(self) -> Counter[tuple[str, str]]:
        """Requests received by method and path."""
        return Counter((each.method, each.path) for each in self.requests())

    def effects(self, service: str | None = None) -> list[Effect]:
        """The effects made, in order, of one service."""
        made = [
            Effect(**{name: value for name, value in record.items() if name != "kind"})
            for record in self._ask("GET", "/effects")
        ]
        return [each for each in made if service in (None, each.service)]

    def wait_for(self, condition: Callable[[], T | None], *, timeout: float = 20.0, what: str = "") -> T:
        """Ask *condition* until it says something true, at most so long; what it said."""
        until = time.monotonic() + timeout
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > until:
                raise TimeoutError(f"not within {timeout} s: {what or condition}; counts {self.counts()}")
            time.sleep(0.01)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(Request(self.url + path, data, method=method), timeout=30) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise ValueError(f"{method} {path}: {error.read().decode()}") from None
