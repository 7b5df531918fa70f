"""A sidecar process, a sandbox process, and attempts that speak through the one to the other.

An attempt here is a token and sockets: closing them is what the sidecar sees of a SIGKILLed agent.
"""

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime import runs
from runtime.database import Connection
from sandbox.client import Effect, Received, Sandbox
from tests.apart import ask_database, fetch

PROJECT = Path(__file__).resolve().parent.parent
ROUTES = PROJECT / "sandbox" / "routes.toml"


@dataclass
class Reply:
    """What an agent received. ``cut``: the connection ended before the answer did."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes
    cut: bool = False

    @property
    def replayed(self) -> bool:
        return self.headers.get("twiceshy-replayed") == "true"

    @property
    def step(self) -> str:
        return self.headers["twiceshy-step"]

    @property
    def error(self) -> str | None:
        return self.headers.get("twiceshy-error")

    def json(self) -> Any:
        return json.loads(self.body)


class SidecarProcess:
    """``python -m proxy.sidecar`` on *dsn*, or another *module* that runs one."""

    def __init__(
        self, dsn: str, folder: Path, port: int = 0, path: Path = PROJECT, python: str = sys.executable,
        module: str = "proxy.sidecar", host: str = "127.0.0.1", **settings: Any,
    ) -> None:  # fmt: skip
        self.folder = folder
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy") and not name.startswith("TWICESHY_")
        }
        environment |= {"DATABASE_URL": dsn, "PYTHONPATH": str(path)}
        if ROUTES.exists() and "config" not in settings:
            environment["TWICESHY_CONFIG"] = str(ROUTES)
        environment |= {f"TWICESHY_{name.upper()}": str(value) for name, value in settings.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "sidecar.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [python, "-m", module, "--folder", str(folder), "--host", host, "--port", str(port)],
                stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=path,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"the sidecar did not start:\n{self.log.read_text()[-3000:]}")
        ready = json.loads(line)
        self.id: str = ready["id"]
        self.port: int = ready["port"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM; SIGKILL if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def memory(self) -> int:
        """Resident bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10
        return 0


@dataclass
class Attempt:
    """An attempt of *run*: what is asked through it is asked by one agent process."""

    run: str
    token: str | None
    port: int
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, timeout: float = 30.0) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.connect()
        self.sockets.append(connection.sock)
        return connection

    def headers(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        pair = f"{self.run}:{self.token or 'none'}".encode()
        return {"Proxy-Authorization": "Basic " + base64.b64encode(pair).decode(), **(extra or {})}

    def ask(
        self,
        method: str,
        url: str,
        body: bytes | str | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        *,
        timeout: float = 30.0,
        connection: http.client.HTTPConnection | None = None,
    ) -> Reply:
        """One request, its answer whole. A time limit or a refused connection raises as in any client."""
        mine = connection or self.connect(timeout)
        sent = dict(headers or {})
        if isinstance(body, dict):
            body = json.dumps(body)
            sent.setdefault("Content-Type", "application/json")
        try:
            mine.request(method, url, body, self.headers(sent))
            answer = mine.getresponse()
            cut = False
            try:
                data = answer.read()
            except http.client.IncompleteRead as error:
                data, cut = error.partial, True
            except ConnectionError:
                data, cut = b"", True
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, answer.reason, named, data, cut)
        finally:
            if connection is None:
                mine.close()

    def send(
        self, method: str, url: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """One request whose answer is for the caller to read, or not."""
        connection = self.connect()
        if isinstance(body, dict):
            headers = {"Content-Type": "application/json", **(headers or {})}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, url, data, self.headers(headers))
        return connection

    def steps(self) -> list[tuple[str, str]]:
        """The steps that this attempt has asked for: key, and live, replayed or joined."""
        return [(key, part) for key, part in self.ask("GET", "http://twiceshy.internal/attempt").json()["steps"]]

    def report(self) -> dict[str, Any]:
        """What the sidecar says of this attempt."""
        found: dict[str, Any] = (
            Attempt(self.run, self.token, self.port).ask("GET", "http://twiceshy.internal/attempt").json()
        )
        return found

    def in_background(self, *arguments: Any, **named: Any) -> "Background":
        return Background(self, *arguments, **named)

    def die(self) -> None:
        """The agent is gone: its kernel closes everything."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.sockets.clear()


class Background:
    """A request asked in a thread of its own."""

    def __init__(self, attempt: Attempt, *arguments: Any, **named: Any) -> None:
        self.reply: Reply | None = None
        self.error: BaseException | None = None

        def work() -> None:
            try:
                self.reply = attempt.ask(*arguments, **named)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def result(self, timeout: float = 30.0) -> Reply:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "no answer in time"
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


class Stack:
    """Sandbox + sidecar on one database."""

    def __init__(self, dsn: str, folder: Path, sandbox: Sandbox, **settings: Any) -> None:
        self.dsn = dsn
        self.folder = folder
        self.sandbox = sandbox
        self.settings = settings
        self.sidecar = SidecarProcess(dsn, folder, **settings)
        self._mark = 0

    def url(self, path: str) -> str:
        return self.sandbox.url + path

    def mark(self) -> None:
        """From here on ``received`` and ``effects`` count; no fault and no gate is left."""
        self.sandbox.clear()
        self._mark = max((each.n for each in self.sandbox.requests()), default=0)

    def received(self, service: str | None = None, *, method: str | None = None) -> list[Received]:
        """The requests that the sandbox received since ``mark``."""
        return [each for each in self.sandbox.requests(service, method=method) if each.n > self._mark]

    def effects(self, service: str | None = None) -> list[Effect]:
        """The effects that were made since ``mark``."""
        return [each for each in self.sandbox.effects(service) if each.n > self._mark]

    def restart(self, *, kill: bool = True) -> None:
        """The sidecar dies (SIGKILL) and a successor takes its port."""
        port = self.sidecar.port
        if kill:
            self.sidecar.kill()
        self.sidecar.stop()
        self.sidecar = SidecarProcess(self.dsn, self.folder, port, **self.settings)

    def claim(self, run: str, *, proved_dead: bool = True, kind: str = "launcher") -> Attempt:
        """A new attempt of *run*, as a launcher on this host would claim it, or somebody else (``claim``)."""

        async def work(connection: Connection) -> str:
            await runs.create(connection, run)
            claim = await runs.claim(
                connection, run, kind=kind, host=socket.gethostname(), folder=str(self.folder),
                lease=float(self.settings.get("lease", 30.0)), proved_dead=proved_dead,
            )  # fmt: skip
            return claim.token

        return Attempt(run, ask_database(self.dsn, work), self.sidecar.port)

    def end(self, attempt: Attempt, outcome: str, exit_code: int | None = 1, *, final: bool = False) -> str:
        """The attempt's process ended; what the launcher would write down."""
        attempt.die()
        return str(
            ask_database(
                self.dsn, runs.end_attempt, attempt.run, runs.hash_token(attempt.token or ""), outcome, exit_code,
                final=final, error=None,
            )
        )  # fmt: skip

    def resolve(self, run: str, step: str, how: Literal["assume_done", "send_again"], **answer: Any) -> str:
        return str(ask_database(self.dsn, runs.resolve, run, step, how, **answer))

    def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        return fetch(self.dsn, statement, *arguments)

    def close(self) -> None:
        self.sidecar.stop()


@contextlib.contextmanager
def stack(dsn: str, folder: Path, *, tls: bool = False, **settings: Any) -> Iterator[Stack]:
    """Both processes, ended at the end. *tls*: the sandbox speaks https, and the sidecar trusts its CA."""
    with Sandbox.start(folder / "sandbox.log", tls=folder / "tls" if tls else None) as sandbox:
        if sandbox.ca is not None:
            settings.setdefault("extra_ca", sandbox.ca)
        made = Stack(dsn, folder / "state", sandbox, **settings)
        try:
            yield made
        finally:
            made.close()
