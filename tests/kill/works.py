"""Workers among the launchers' world: declared agents, a queue, and what became of it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from runtime import queue
from runtime.database import Connection
from runtime.launch.guardian import processes
from tests.apart import ask_database
from tests.kill.launchers import Bench, World, until
from tests.stack import PROJECT, ROUTES

#: Over the beginning of all agents (tests.kill.launchers).
INPUT = """
RUN = os.environ["TWICESHY_RUN"]
def internal(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://twiceshy.internal" + path, data, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")
def write(text):
    return call("POST", "/email/send", {"to": "a@example.org", "subject": RUN, "text": text})
"""


class Works(Bench):
    """A bench with agents that are declared, and workers."""

    def __init__(self, world: World, folder: Path, run: str) -> None:
        super().__init__(world, folder, run)
        self.logs: dict[int, Path] = {}
        self.config = folder / "twiceshy.toml"

    def declare(self, body: str, **more: Any) -> None:
        """The agents ``a`` and ``b`` are this program, which gets the name as its argument."""
        self.agent(INPUT + body)
        tables = [
            f"[agents.{name}]\ncommand = {json.dumps([sys.executable, str(self.program), name])}\n"
            + "".join(f"{field} = {value}\n" for field, value in more.items())
            for name in ("a", "b")
        ]
        self.config.write_text("\n".join([ROUTES.read_text(), *tables]), "utf-8")

    def declare_function(self, body: str, **more: Any) -> None:
        """The agents ``a`` and ``b`` are the function ``work`` of this module."""
        self.agent(INPUT + body)
        fields = {"python": "agent:work", "interpreter": sys.executable} | more
        lines = "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())
        self.config.write_text("\n".join([ROUTES.read_text(), *(f"[agents.{name}]\n{lines}" for name in ("a", "b"))]))

    def forked(self) -> list[int]:
        """The living agents that were forked, which bear their names."""
        found = []
        for process in processes():
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{process.pid}")
                if path.joinpath("cwd").readlink() == self.folder and process.state not in "ZX":
                    found += [process.pid] if path.joinpath("comm").read_text().strip() in ("a", "b") else []
        return found

    def fork_servers(self) -> list[int]:
        """The living fork servers, whose parents are workers."""
        servers = []
        for process in processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                if b"forkserver.py" in command and process.parent in self.logs and process.state not in "ZX":
                    servers.append(process.pid)
        return servers

    def said(self) -> str:
        """What all workers and their agents have said."""
        return "".join(log.read_text() for log in self.logs.values())

    def result(self, run: str) -> Any:
        found = self.world.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"]
        return None if found is None else json.loads(found)

    def error(self, run: str) -> str:
        return str(self.world.fetch("SELECT error FROM twiceshy.run WHERE id = $1", run)[0]["error"])

    def environment(self, **settings: object) -> dict[str, str]:
        own = {f"TWICESHY_{name.upper()}": str(value) for name, value in settings.items()}
        return self.world.environment | {"HERE": str(self.folder), "TWICESHY_CONFIG": str(self.config)} | own

    def worker(self, *flags: str, more: dict[str, str] | None = None, **settings: object) -> "subprocess.Popen[str]":
        log = self.folder / f"worker-{len(self.logs)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "proxy.cli", "worker", "--agent", "a", "--agent", "b", *flags],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, text=True,
                env=self.environment(**settings) | (more or {}), cwd=PROJECT,
            )  # fmt: skip
        self.logs[process.pid] = log
        self.started.append(process)
        return process

    def cli(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "proxy.cli", *words], capture_output=True, text=True, timeout=60,
            env=self.environment(), cwd=PROJECT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def queue(self, *names: str, agent: str = "a", priority: int = 0, given: bytes | None = None) -> list[str]:
        """Runs of *agent*, named after the test."""

        async def work(connection: Connection) -> list[str]:
            return [
                await queue.start(connection, agent, given, run_id=f"{self.run_id}-{name}", priority=priority)
                for name in names
            ]

        return ask_database(self.world.dsn, work)

    def comes(self, status: str, *runs: str, seconds: float = 60.0) -> None:
        def all_are() -> bool:
            found = self.world.fetch("SELECT DISTINCT status FROM twiceshy.run WHERE id = ANY($1)", list(runs))
            return [row["status"] for row in found] == [status]

        try:
            until(all_are, f"{runs} are {status}", seconds)
        except AssertionError as error:
            told = "\n".join(log.read_text() for log in self.logs.values())
            stand = {run: (self.world.status(run), self.world.outcomes(run)) for run in runs}
            raise AssertionError(f"{error}: {stand}\n{told}") from None

    def ends(self, worker: "subprocess.Popen[str]") -> int:
        try:
            return worker.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker does not end:\n{self.logs[worker.pid].read_text()}") from None

    def mails(self) -> list[tuple[str, str]]:
        """Whose mails were sent, and what they say, sorted."""
        bodies = [each.json() for each in self.sandbox.requests("email")]
        return sorted((body["subject"], body["text"]) for body in bodies if body["subject"].startswith(self.run_id))
