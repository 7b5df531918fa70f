"""A keeper, a sidecar, a sandbox and launchers among them, all real processes, for the launcher's tests."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.launch.guardian import processes
from sandbox.client import Sandbox
from tests.apart import fetch
from tests.stack import PROJECT, ROUTES

#: What every agent below begins with.
AGENT = """
import json, os, sys, time, threading, urllib.request, urllib.error
URL, HERE = os.environ["SANDBOX_URL"], os.environ["HERE"]
def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
def order(n=1):
    return call("POST", "/orders", {"lines": [{"sku": "rice", "count": n}], "total": n})
def mail():
    return call("POST", "/email/send", {"to": "a@example.org", "subject": "s", "text": "t"})
def started():
    with open(HERE + "/starts", "a") as file: file.write("x")
    return os.path.getsize(HERE + "/starts")
def until(name):
    while not os.path.exists(f"{HERE}/{name}"): time.sleep(0.01)
turn = started()
"""

HOLD = """
import asyncio, sys
from proxy.cli import SIDECAR
from runtime.keeping import Keeping
from runtime.settings import load
async def main():
    async with await Keeping.open(load(), SIDECAR) as keeping:
        while True:
            print(keeping.keeper_pid, keeping.sidecar_pid, flush=True)
            await keeping.changed()
asyncio.run(main())
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


class World:
    """A keeper with its sidecar, a sandbox, and launchers among them."""

    def __init__(self, dsn: str, home: Path, sandbox: Sandbox, **settings: str) -> None:
        self.dsn = dsn
        self.home = home
        self.sandbox = sandbox
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self.environment = kept | {
            "DATABASE_URL": dsn, "TWICESHY_HOME": str(home), "TWICESHY_CONFIG": str(ROUTES), "TWICESHY_POLL": "0.1",
            "TWICESHY_BACKOFF": "0.05", "TWICESHY_MAX_ATTEMPTS": "3", "PYTHONPATH": str(PROJECT),
            "SANDBOX_URL": sandbox.url,
        }  # fmt: skip
        self.environment |= {f"TWICESHY_{name.upper()}": value for name, value in settings.items()}
        if sandbox.ca is not None:
            self.environment["TWICESHY_EXTRA_CA"] = str(sandbox.ca)
        self.keeper = self.sidecar = 0
        self.holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env=self.environment)
        self._known = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._known.wait(60)

    def _listen(self) -> None:
        assert self.holder.stdout is not None
        for line in self.holder.stdout:
            self.keeper, self.sidecar = map(int, line.split())
            self._known.set()

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()
        self._listener.join()
        assert self.holder.stdout is not None
        self.holder.stdout.close()

    def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        return fetch(self.dsn, statement, *arguments)

    def outcomes(self, run: str) -> list[str | None]:
        rows = self.fetch("SELECT outcome FROM twiceshy.attempt WHERE run_id = $1 ORDER BY n", run)
        return [row["outcome"] for row in rows]

    def status(self, run: str) -> str:
        return str(self.fetch("SELECT status FROM twiceshy.run WHERE id = $1", run)[0]["status"])


class Bench:
    """One test's part of the world: its agent, its run, its launchers."""

    def __init__(self, world: World, folder: Path, run: str) -> None:
        self.world = world
        self.sandbox = world.sandbox
        self.folder = folder
        self.run_id = run
        self.program = folder / "agent.py"
        self.started: list[subprocess.Popen[str]] = []
        self.before = world.sandbox.counts()

    def agent(self, body: str) -> None:
        self.program.write_text(AGENT + body)

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.program)]

    @property
    def starts(self) -> int:
        path = self.folder / "starts"
        return path.stat().st_size if path.exists() else 0

    def launch(self, *command: str, run: str | None = None, flags: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        words = ["run", "--run", run or self.run_id, *flags, "--", *(command or self.command)]
        process = subprocess.Popen(
            [sys.executable, "-m", "proxy.cli", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.world.environment | {"HERE": str(self.folder)}, cwd=self.folder,
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self, process: "subprocess.Popen[str]", seconds: float = 60) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the launcher does not end; it said: {process.communicate()}") from None
        return process.returncode, out, err

    def run(self, *command: str, **more: Any) -> tuple[int, str, str]:
        return self.end(self.launch(*command, **more))

    def verb(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.shell(shlex.join([sys.executable, "-m", "proxy.cli", *words]))

    def shell(self, script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["sh", "-c", f"{script}\nexit $?"], capture_output=True, text=True, timeout=60, cwd=self.folder,
            env=self.world.environment | {"HERE": str(self.folder)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def agents(self) -> list[int]:
        """The living processes of the agent, shells around it included."""
        mark = str(self.program).encode()
        found = []
        for process in processes():
            try:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:
                continue
            if mark in command and b"proxy.cli" not in command and b"guardian.py" not in command:
                found.append(process.pid)
        return found

    def made(self, service: str) -> int:
        return self.sandbox.counts().get(service, 0) - self.before.get(service, 0)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    @property
    def outcomes(self) -> list[str | None]:
        return self.world.outcomes(self.run_id)
