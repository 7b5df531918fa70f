"""Where an SDK's program is run: under ``twiceshy run``, on a sandbox of its own over TLS."""

import contextlib
import http.client
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.folder import tail
from sandbox.client import Received, Sandbox
from tests.kill.launchers import Bench, World, until
from tests.sdk.sdks import PROGRAMS, Sdk, interpreter
from tests.stack import Attempt

#: Some of these SDKs take seconds to be imported, on a machine that has nothing else to do.
PATIENCE = 120.0


class Moto:
    """A moto server: AWS on this machine."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [interpreter(".py"), str(PROGRAMS / "moto_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
        connection.close()

    def close(self) -> None:
        self.process.communicate()


class Place:
    """A keeper with its sidecar, moto when it is needed, and a sandbox for each run."""

    def __init__(self, world: World, tls: Path) -> None:
        self.world = world
        self._tls = tls
        self._moto: Moto | None = None

    @contextlib.contextmanager
    def stage(self, sdk: Sdk, folder: Path, port: int = 0) -> Iterator["Stage"]:
        """One run of *sdk*'s program in *folder*, which is made. *port*: the sandbox's, for equal addresses."""
        passed = {}
        if sdk.upstream == "moto":
            self._moto = self._moto or Moto()
            self._moto.reset()
            passed["aws"] = self._moto.url
        folder.mkdir()
        # Not in the folder: that is how the agent's processes are told from others.
        log = folder.with_name(f"log-of-{folder.name}")
        with Sandbox.start(log, tls=self._tls, port=port, passed=passed) as sandbox:
            stage = Stage(self.world, folder, sdk, sandbox)
            try:
                yield stage
            except BaseException:
                for log in self.world.home.rglob("keeper.log"):
                    print(tail(log))
                raise
            finally:
                for process in stage.started:
                    process.kill()
                    process.communicate()
                until(lambda: not stage.agents(), "no agent is left")

    def close(self) -> None:
        if self._moto is not None:
            self._moto.close()


@dataclass(frozen=True)
class Came:
    """What came of a run: what its agent printed, and what reached the sandbox."""

    lines: list[str]
    calls: list[Received]
    effects: list[tuple[Any, ...]]

    @property
    def asked(self) -> list[tuple[str, str, str]]:
        """What was asked of the sandbox, but for reads: those may be made again."""
        return [(each.method, each.target, each.sha256) for each in self.calls if not is_read(each)]


class Stage(Bench):
    """One run of one SDK's program."""

    def __init__(self, world: World, folder: Path, sdk: Sdk, sandbox: Sandbox) -> None:
        slug = "".join(each if each.isalnum() else "-" for each in f"{folder.parent.name}-{folder.name}")
        super().__init__(world, folder, slug)
        self.sdk = sdk
        self.sandbox = sandbox
        self.program = folder  # the agent is told by it, as its last argument

    def start(self, **more: str) -> "subprocess.Popen[str]":
        """Start the program under a launcher. *more*: variables."""
        given = [f"{name}={value}" for name, value in (self.sdk.given(self.sandbox.url) | more).items()]
        return self.launch("env", *given, *self.sdk.command(), str(self.folder))

    def came(self, launcher: "subprocess.Popen[str]") -> Came:
        """Wait for the end of *launcher*: exit code 0, and the run is done."""
        code, out, err = self.end(launcher, PATIENCE)
        assert code == 0, (code, out, err)
        made = [
            (each.service, each.effect, each.id, each.sha256, each.key is not None, each.facts)
            for each in self.sandbox.effects()
        ]
        return Came(out.splitlines(), self.sandbox.requests(), made)

    def kill(self) -> int:
        """SIGKILL the agent; the pid it had."""
        [agent] = self.agents()
        os.kill(agent, signal.SIGKILL)
        return agent

    def wait_held(self, gate: str) -> None:
        self.sandbox.wait_held(gate, timeout=PATIENCE)

    def wait_asked(self, after: int, count: int) -> None:
        """Wait until the attempt that came after process *after* has asked for *count* steps."""

        def asked() -> bool:
            return any(pid != after and self._steps(pid) >= count for pid in self.agents())

        until(asked, f"{count} steps are asked for", PATIENCE)

    def _steps(self, pid: int) -> int:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        except OSError:
            return 0
        given = dict(word.split("=", 1) for word in words if "=" in word)
        if given.get("TWICESHY_RUN") != self.run_id:
            return 0  # not yet what it will be
        attempt = Attempt(self.run_id, given["TWICESHY_TOKEN"], int(given["HTTPS_PROXY"].rpartition(":")[2]))
        reply = attempt.ask("GET", "http://twiceshy.internal/attempt")
        return len(reply.json()["steps"]) if reply.status == 200 else 0


def is_read(call: Received) -> bool:
    return call.method in ("GET", "HEAD")


def hold(calls: list[Received], n: int, gate: str) -> dict[str, Any]:
    """The fault that holds the *n*-th of *calls* (from 0) when it has had its effect, a stream in its middle."""
    call = calls[n]
    earlier = sum((each.method, each.path) == (call.method, call.path) for each in calls[:n])
    nth = 1 + (2 * earlier if is_read(call) else earlier)  # a read whose client was killed is made again
    match = {"method": call.method, "path": call.path}
    streamed = b'"stream":true' in call.body.replace(b" ", b"") or ":stream" in call.target
    return {"match": match, "nth": nth, **({"hold_events": {2: gate}} if streamed else {"hold": gate})}


def restarts(out: list[str], lines: list[str]) -> int:
    """How often an agent began to say *lines* from the top, the last time to the end. Raises AssertionError."""
    begun, at = 0, len(lines)
    for each in out:
        if at < len(lines) and each == lines[at]:
            at += 1
        else:
            assert each == lines[0], f"said {each!r}, after {lines[:at]}; undisturbed: {lines}"
            begun, at = begun + 1, 1
    assert at == len(lines), f"the last attempt did not say all of {lines}: {out}"
    return begun
