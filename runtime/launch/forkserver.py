"""Forks agents from a process that has imported their libraries. Standard library only, Python 3.9 or newer.

    python forkserver.py SAY ASKED NAME…

A worker starts it with the agent's own interpreter in the agent's folder (``runtime.launch.python_agent``). Rules:

* It imports the libraries NAME… once, and says so on SAY, a pipe, in lines: ``importing NAME``, then ``ready THREADS``
  (how many of them the libraries have started) or ``failed WORDS``.
* ASKED is a socket. Each message is an agent to start, and brings descriptors: a connection, both ends that a guardian
  has (guardian.py), and a file with the words (JSON). The process that is forked is a guardian like any other, in a
  group of its own; it forks the agent, which sets its environment, *then* imports its module, and calls its function.
  A client that is built before the environment is set has no proxy, ever: so the agent's own code is not loaded here.
* The guardian's number is told on the connection, and stays taken until the worker closes its side of it; then comes
  how the guardian ended.
* It ends with the worker, which holds the other end of ASKED. Agents do not end with it.

It does not restart, decide or speak to a database.
"""

import base64
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import operator
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.launch import guardian
else:
    if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file: nothing in it is for agents
    _path = __file__.removesuffix("forkserver.py") + "guardian.py"
    _spec = importlib.util.spec_from_file_location("twiceshy_guardian", _path)
    guardian = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(guardian)

PR_SET_NAME = 15
INTERNAL = "http://twiceshy.internal"


class BecomeAgent(Exception):
    """Raised in the process that is to be the agent: it leaves the guardian's and the server's frames."""


class Guardian(guardian.Guardian):
    """The guardian of an agent that is forked and executes nothing."""

    def start(self) -> int:
        """Fork the agent. It cannot fail later than that."""
        here = os.getpid()
        self.agent = os.fork()
        if self.agent == 0:
            self.become_agent(here)
            # As a Python that was just started has them.
            if signal.SIGINT not in self.ignored:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            for fd in (self.control, self.report_fd, self.wake, self.wake_write):
                os.close(fd)
            raise BecomeAgent
        return 0


class Server:
    """The fork server's state: its agents' guardians, and who wants to hear of their ends."""

    def __init__(self, say: int, asked: socket.socket) -> None:
        self.say_fd = say
        self.asked = asked
        #: By the guardian's number: the connection to whoever asked for it, and whether it may be forgotten.
        self.guardians: dict[int, tuple[socket.socket, bool]] = {}
        self.wake, self.wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_write, False)

    def say(self, words: str) -> None:
        with contextlib.suppress(OSError):  # the worker is gone: ASKED says so too
            os.write(self.say_fd, words.encode("utf-8", "replace") + b"\n")

    def preload(self, names: "list[str]") -> bool:
        for name in names:
            self.say(f"importing {name}")
            try:
                importlib.import_module(name)
            except BaseException as error:
                traceback.print_exc()
                self.say(f"failed {name}: {type(error).__name__}: {' '.join(str(error).split())}")
                return False
        # The collector would write to every page that the agents share with this process.
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        self.say(f"ready {len(os.listdir('/proc/self/task')) - 1}")
        return True

    def serve(self) -> "Call | None":
        """Fork what is asked for. Returns in the agents' processes, each with its call; None: the worker is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        while True:
            poll = select.poll()
            poll.register(self.asked, select.POLLIN)
            poll.register(self.wake, select.POLLIN)
            by_fd = {connection.fileno(): pid for pid, (connection, free) in self.guardians.items() if not free}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self.wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
            for fd in ready & by_fd.keys():
                connection, _ = self.guardians[by_fd[fd]]
                self.guardians[by_fd[fd]] = (connection, True)
            self.reap()
            if self.asked.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self.asked, 64, 4)
                if not message:
                    return None
                call = self.fork(*fds)
                if call is not None:
                    return call

    def reap(self) -> None:
        """Let go of the numbers that are not asked for any more, and tell how their guardians ended."""
        for pid, (connection, free) in list(self.guardians.items()):
            if not free:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    connection.send(b"%d\n" % os.waitstatus_to_exitcode(status))
                connection.close()
                del self.guardians[pid]

    def fork(self, connection_fd: int, control: int, report: int, words: int) -> "Call | None":
        """One agent more; its call, in its own process."""
        connection = socket.socket(fileno=connection_fd)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads the worker is told once
            pid = os.fork()
        if pid:
            for fd in (control, report, words):
                os.close(fd)
            self.guardians[pid] = (connection, False)
            with contextlib.suppress(OSError):
                connection.send(b"%d\n" % pid)
            return None
        try:
            os.setpgid(0, 0)
            self.forget()
            connection.close()
            with os.fdopen(words, "rb") as file:
                call = Call(json.load(file))
            Guardian(control, report, frozenset(call.ignored), [call.target]).run()
        except BecomeAgent:
            return call
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def forget(self) -> None:
        """Close what is the server's alone: in its children nothing else would."""
        signal.set_wakeup_fd(-1)
        for connection, _ in self.guardians.values():
            connection.close()
        self.asked.close()
        for fd in (self.say_fd, self.wake, self.wake_write):
            os.close(fd)


class Call:
    """What an agent does: its function, on its run's input."""

    def __init__(self, words: "dict[str, Any]") -> None:
        self.target: str = words["target"]
        self.name: str = words["name"]
        self.folder: str = words["folder"]
        self.env: dict[str, str] = words["env"]
        self.ignored: list[int] = words["ignored"]

    def __call__(self) -> None:
        """Set the environment, import the module, call the function, hand in what it returns."""
        os.environ.clear()
        os.environ.update(self.env)
        with contextlib.suppress(OSError, ValueError):  # ps and top show it
            ctypes.CDLL(None).prctl(PR_SET_NAME, self.name.encode("ascii", "replace")[:15], 0, 0, 0)
        sys.argv = [self.target]
        sys.path.insert(0, self.folder)
        module, _, function = self.target.partition(":")
        called = operator.attrgetter(function)(importlib.import_module(module))
        given = json.loads(ask("GET", "/run"))["input"]
        result = called(given) if _takes_one(called) else called()
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_wait_for(result))
        if result is None:
            return  # the result is what it has PUT itself, else null
        try:
            body = json.dumps(result, allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{self.target} returned what is not JSON: {error}") from None
        ask("PUT", "/result", body)


def _takes_one(function: Any) -> bool:
    """Whether it takes the input: all do but those that have no parameter at all."""
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return True


async def _wait_for(result: "Awaitable[Any]") -> Any:
    return await result


def ask(method: str, path: str, body: bytes = b"") -> bytes:
    """Ask the sidecar. Not by an HTTP library: which of them is loaded, and when, is the agent's business."""
    credentials, _, address = os.environ["http_proxy"].partition("://")[2].rpartition("@")
    host, _, port = address.rpartition(":")
    head = (
        f"{method} {INTERNAL}{path} HTTP/1.1\r\nHost: twiceshy.internal\r\nConnection: close\r\n"
        f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host.strip("[]"), int(port))) as connection:
        connection.sendall(head.encode("ascii") + body)
        pieces = []
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    head, _, answer = b"".join(pieces).decode("utf-8", "surrogateescape").partition("\r\n\r\n")
    status = head.split(" ", 2)[1:2]
    if status not in (["200"], ["204"]):
        words = " ".join(answer.split()).encode("ascii", "backslashreplace").decode()
        raise SystemExit(f"{method} {INTERNAL}{path}: {head.partition(chr(13))[0]}: {words}")
    return answer.encode("utf-8", "surrogateescape")


def main(argv: "list[str]") -> None:
    """Be the fork server that *argv* describes, and then, in other processes, its agents."""
    say, asked, *names = argv
    server = Server(int(say), socket.socket(fileno=int(asked)))
    ctypes.CDLL(None).prctl(guardian.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if server.preload(names):
        call = server.serve()
        if call is not None:
            call()


if __name__ == "__main__":
    main(sys.argv[1:])
