"""The guardian of one agent: its parent, and the end of everything it started. Standard library only.

    python -I -S guardian.py CONTROL REPORT IGNORED COMMAND…

It runs between the launcher and the agent, because PDEATHSIG reaches only the first child: under
``sh -c 'python agent.py; true'`` a killed launcher would leave the Python process at work, with a token
that is still good. Rules:

* It leads the agent's process group and is a *subreaper*: whatever the agent starts, also with
  ``setsid`` or a double fork, stays below it and is found through /proc.
* CONTROL is the reading end of a pipe whose only other end the launcher holds. One byte starts the
  agent. End of file, however it came about, SIGKILLs the group and every descendant.
* REPORT gets lines: ``ready`` (signals are held, the group may become the terminal's foreground) |
  ``agent PID`` | ``failed ERRNO`` (not started) | ``signal N`` (the group got it, from
  the terminal for example) | ``stopped N`` (job control) | ``exit CODE PID…`` (negative: killed by that
  signal; the pids are those that could not be killed). Nothing comes after ``failed`` or ``exit``.
* Standard input, output and error are the agent's: it never reads or writes them.
* IGNORED lists the signals that the launcher's own parent had set to be ignored (``nohup``, ``&`` in a
  script): the agent finds them as they were, and all others at their defaults.

It does not restart, decide or speak to a database.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

#: Reported when the group gets them; the guardian itself lives on.
REPORTED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
#: Job control stops the agent, never its guardian, which must hear of the launcher's death.
STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: What an agent that exited left running gets this long to end by itself, in seconds: helpers that see
#: their parent go (multiprocessing's resource tracker) clean up in a few milliseconds. After a death by
#: signal nothing is waited for: the next attempt starts at once.
LEFT_BEHIND = 0.5
#: Killed processes are gone in milliseconds; those that are not (another user's, or stuck in the kernel)
#: are reported as left after this long.
UNKILLABLE = 5.0


class Process(NamedTuple):
    """One line of /proc, as far as it matters here."""

    pid: int
    state: str
    parent: int
    group: int


def processes() -> Iterator[Process]:
    """Every process that /proc shows."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The command's name stands in parentheses and may itself hold spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if len(fields) > 2:
            yield Process(int(name), fields[0].decode(), int(fields[1]), int(fields[2]))


def below(root: int, group: int) -> list[int]:
    """The living processes that descend from *root* or are in *group*, without *root* itself."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    dead: set[int] = set()
    for process in processes():
        children.setdefault(process.parent, []).append(process.pid)
        if process.group == group:
            found.add(process.pid)
        if process.state in "ZX":
            dead.add(process.pid)
    open_ends = [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            found.add(pid)
            open_ends.append(pid)
    return sorted(found - dead - {root})


class Guardian:
    """The state of one guardian process."""

    def __init__(self, control: int, report: int, ignored: frozenset[int], command: list[str]) -> None:
        self.control = control
        self.report_fd = report
        self.ignored = ignored
        self.command = command
        self.agent = 0
        self.exit: int | None = None
        self.libc = ctypes.CDLL(None, use_errno=True)
        # A signal must wake the poll: its number comes as a byte.
        self.wake, self.wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_write, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def report(self, *words: object) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the control pipe says so too
            os.write(self.report_fd, " ".join(map(str, words)).encode() + b"\n")

    def run(self) -> None:
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # SIGSTOP cannot be ignored: one that is stopped with its group must still hear of the launcher's death. The
        # kernel wakes orphaned groups only, and below another subreaper of the same session this one is none.
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
        for fd in (self.control, self.report_fd):
            os.set_inheritable(fd, False)
        for number in (*REPORTED, signal.SIGCHLD):
            if number not in self.ignored:
                signal.signal(number, lambda *_: None)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        self.report("ready")
        if not os.read(self.control, 1):
            return  # the launcher died before it said go
        error = self.start()
        if error:
            self.report("failed", error)
            return
        self.report("agent", self.agent)
        self.let_go_of_the_streams()
        self.watch()

    def start(self) -> int:
        """Fork and exec the agent. Returns 0 or the errno of the exec that failed."""
        told, tell = os.pipe()  # closed by a successful exec
        guardian = os.getpid()
        self.agent = os.fork()
        if self.agent == 0:
            try:
                self.become_agent(guardian)
                os.execvp(self.command[0], self.command)
            except OSError as failure:
                os.write(tell, str(failure.errno).encode())
            finally:
                os._exit(127)
        os.close(tell)
        answer = os.read(told, 16)
        os.close(told)
        return int(answer or 0)

    def become_agent(self, guardian: int) -> None:
        """What the forked process owes to its launcher and finds of it: death with *guardian*, and signals."""
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:
            os._exit(127)
        signal.set_wakeup_fd(-1)
        for number in (*REPORTED, *STOPS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)

    def let_go_of_the_streams(self) -> None:
        """Who reads the agent's output must see its end, and who writes its input must get the EPIPE."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)

    def watch(self) -> None:
        """Until the agent has exited or the launcher is gone; then until nothing is left."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        deadline = None
        while True:
            if not self.reap():
                break  # no child: hence, below a subreaper, no descendant either
            if self.exit is not None and deadline is None:
                deadline = time.monotonic() + (LEFT_BEHIND if self.exit >= 0 else 0.0)
            wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = [fd for fd, _ in poll.poll(wait)]
            if self.wake in ready:
                self.hear()
            if self.control in ready and not os.read(self.control, 1):
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        left = self.end_all()
        self.hear()  # a Ctrl-C that ended the agent came before its end, and is told before it
        self.report("exit", 0 if self.exit is None else self.exit, *left)

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self.wake, 4096):
                if number != signal.SIGCHLD:
                    self.report("signal", number)

    def reap(self) -> bool:
        """Collect every child that has something to tell. False when there is none left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid != self.agent:
                continue
            if os.WIFSTOPPED(status):
                self.report("stopped", os.WSTOPSIG(status))
            else:
                self.exit = os.waitstatus_to_exitcode(status)

    def end_all(self) -> list[int]:
        """SIGKILL until nothing is left: a process may fork while the list is read. Returns the unkillable."""
        deadline = time.monotonic() + UNKILLABLE
        while True:
            try:
                left = below(os.getpid(), os.getpgrp())
            except OSError:  # no /proc: the group at least, and that includes this process
                os.killpg(0, signal.SIGKILL)
                raise
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not self.reap() and not left:
                return []
            if time.monotonic() > deadline:
                return left
            select.select([self.wake], [], [], 0.02)
            self.hear()


def main(argv: list[str]) -> None:
    """Be the guardian that *argv* describes."""
    control, report, ignored, *command = argv
    Guardian(int(control), int(report), frozenset(map(int, ignored.split(",") if ignored else ())), command).run()


if __name__ == "__main__":
    main(sys.argv[1:])
