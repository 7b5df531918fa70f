"""Who speaks for a run: how a request names it, and agents that are processes of their own.

A run that is named without a token is told by its process, so the sockets of ``tests.stack`` will not always do.
"""

import base64
import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.stack import Attempt, Reply, Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
RESULT = "http://twiceshy.internal/result"
INTERNAL = "http://twiceshy.internal/run"


def order(n: int = 1) -> dict[str, object]:
    return {"lines": [{"sku": "tea", "n": n}], "total": n}


def status(stack: Stack, run: str) -> tuple[str, str | None]:
    """How the run stands, and how its last attempt ended."""
    rows = stack.fetch(
        "SELECT r.status, t.outcome FROM twiceshy.run r JOIN twiceshy.attempt t ON t.run_id = r.id AND t.n = r.attempt "
        "WHERE r.id = $1", run,
    )  # fmt: skip
    return rows[0]["status"], rows[0]["outcome"]


# ---- how a request names its run

Form = Callable[[str, str | None, str], tuple[str, dict[str, str]]]


def credentials(run: str, token: str | None, url: str) -> tuple[str, dict[str, str]]:
    pair = base64.b64encode(f"{run}:{token or 'none'}".encode()).decode()
    return url, {"Proxy-Authorization": f"Basic {pair}"}


def by_header(run: str, token: str | None, url: str) -> tuple[str, dict[str, str]]:
    return url, {"Twiceshy-Run": run} | ({} if token is None else {"Twiceshy-Token": token})


def gateway(run: str, token: str | None, url: str) -> tuple[str, dict[str, str]]:
    scheme, _, rest = url.partition("://")
    return f"/@{run}:{token or 'none'}/{scheme}/{rest}", {}


forms = pytest.mark.parametrize("form", [credentials, by_header, gateway])


class Bare(Attempt):
    """Sends the headers that it is given, and none of its own."""

    def headers(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        return dict(extra or {})


def ask(
    stack: Stack, form: Form, run: str, token: str | None, method: str, path: str, body: Any = None,
    also: dict[str, str] | None = None,
) -> Reply:  # fmt: skip
    """One request of the test's own process, which names its run by *form*."""
    target, headers = form(run, token, path if path.startswith("http:") else stack.url(path))
    return Bare(run, token, stack.sidecar.port).ask(method, target, body, headers | (also or {}))


# ---- processes

#: Asks what it is told to on standard input, one line each, and says what it got.
SPEAKER = """
import http.client, json, sys
def ask(port, method, url, body, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, url, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.reason, answer.getheaders(), answer.read().decode("latin-1")
for line in sys.stdin:
    try:
        said = ask(*json.loads(line))
    except (OSError, http.client.HTTPException) as error:
        said = repr(error)
    print(json.dumps(said), flush=True)
"""


class Speaker:
    """An agent of *run* that has no token, in a process group of its own, or in that of *group*."""

    def __init__(self, stack: Stack, run: str, group: int = 0) -> None:
        self.stack = stack
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SPEAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=group,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(
        self, method: str, path: str, body: dict[str, Any] | str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """Ask, and do not wait for the answer: ``answer`` does."""
        url = path if path.startswith("http:") else self.stack.url(path)
        given = {"Twiceshy-Run": self.run, **(headers or {})}
        if isinstance(body, dict):
            given.setdefault("Content-Type", "application/json")
            body = json.dumps(body)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([self.stack.sidecar.port, method, url, body, given]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Reply:
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        assert isinstance(said, list), said
        status, reason, headers, text = said
        return Reply(status, reason, {name.lower(): value for name, value in headers}, text.encode("latin-1"))

    def ask(
        self, method: str, path: str, body: dict[str, Any] | str | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        self.begin(method, path, body, headers)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Script:
    """A process group whose leader never speaks: a script's shell."""

    def __init__(self) -> None:
        self.leader = subprocess.Popen(["sleep", "600"], process_group=0)
        self.speakers: list[Speaker] = []

    def speaker(self, stack: Stack, run: str) -> Speaker:
        """One more agent in this group."""
        self.speakers.append(Speaker(stack, run, self.leader.pid))
        return self.speakers[-1]

    def end_leader(self) -> None:
        self.leader.send_signal(signal.SIGKILL)
        self.leader.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for speaker in self.speakers:
            speaker.kill()
        self.end_leader()


AS_USER = """#!{own} -IS
import os, sys
os.environ["PYTHONPATH"] += ":{packages}"
os.environ["HOME"] = "/"
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
os.execv("{python}", ["{python}", *sys.argv[1:]])
"""


def as_user(uid: int, python: str, folder: Path) -> str:
    """A program in *folder* that runs *python*, with our packages, as user *uid*."""
    program = folder / "python"
    packages = sysconfig.get_path("purelib")
    program.write_text(AS_USER.format(own=sys.executable, packages=packages, uid=uid, python=python))
    program.chmod(0o755)
    return str(program)


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Nobody but root may look into this process, even if he is the same user."""
    dumpable, libc = 4, ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(dumpable, 0, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(dumpable, 1, 0, 0, 0)
