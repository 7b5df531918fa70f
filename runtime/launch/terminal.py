"""The terminal: whose foreground it is, and what Ctrl-C and Ctrl-Z mean for launcher and agent.

The agent's process group is the terminal's foreground group, so that it can read the terminal and so that
Ctrl-C, Ctrl-\\ and Ctrl-Z reach it as they would without us. Rules:

* Only when standard input is the controlling terminal and we are in its foreground ourselves. In a
  pipeline (``twiceshy run … | less``) our neighbours would lose the terminal, so it is handed over no
  sooner than the agent asks for it, by being stopped with SIGTTIN or SIGTTOU.
* SIGTTOU is ignored while the terminal is handed over: else our own words (``stty tostop``) and taking it
  back would stop us.
* When the agent stops, the launcher takes the terminal back and stops its own group with the same signal:
  the shell sees a stopped job. When it is continued the agent is too. Where nobody could continue us (an
  orphaned group: ``ssh -t``, ``docker run -it``) the kernel does not stop us, and the agent goes on at once.
* At the end it is ours again, with the modes that it had when we started if the agent was killed.
"""

import contextlib
import os
import signal
import termios
import time
from typing import Any

from runtime.launch import guardian


def is_foreground(fd: int) -> bool:
    """Whether *fd* is our controlling terminal and our group is in its foreground."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def has_neighbours() -> bool:
    """Whether our process group holds others than us, our ancestors and our children (a pipeline)."""
    all_of_them = {process.pid: process for process in guardian.processes()}
    ours = os.getpid()
    ancestors = set()
    pid = ours
    while pid in all_of_them and pid not in ancestors:
        ancestors.add(pid)
        pid = all_of_them[pid].parent
    return any(
        process.group == os.getpgrp() and process.pid not in ancestors and process.parent != ours
        for process in all_of_them.values()
        if process.state not in "ZX"
    )


class Terminal:
    """The terminal on *fd*, if it is one and ours to give."""

    def __init__(self, fd: int = 0) -> None:
        self.fd = fd
        #: Standard input is our controlling terminal. Everything below is a no-op where it is not.
        self.controls = False
        self.given: int | None = None
        self.modes: list[Any] | None = None
        self._ttou: Any = None
        with contextlib.suppress(OSError, termios.error):
            os.tcgetpgrp(fd)  # fails for anything but the controlling terminal
            self.modes = termios.tcgetattr(fd)
            self.controls = True
            self._ttou = signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def offer(self, group: int) -> None:
        """Hand the foreground to *group*, unless it is not ours or a neighbour may need it."""
        if self.controls and not has_neighbours():
            self.give(group)

    def give(self, group: int) -> bool:
        """Hand the foreground to *group* if it is ours. True when it was."""
        if not self.controls or not is_foreground(self.fd):
            return False
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self.fd, group)
            self.given = group
            return True
        return False

    def take(self, *, reset: bool = False) -> None:
        """Take the foreground back from the group it was given to. *reset*: the modes of our start, too."""
        if self.given is None:
            return
        with contextlib.suppress(OSError, termios.error):
            # A shell that has put itself into the foreground meanwhile keeps it.
            if os.tcgetpgrp(self.fd) == self.given:
                os.tcsetpgrp(self.fd, os.getpgrp())
                if reset and self.modes is not None:
                    termios.tcsetattr(self.fd, termios.TCSADRAIN, self.modes)
        self.given = None

    def stopped(self, number: int, group: int, *, asked: bool = False) -> float | None:
        """The agent's *group* was stopped by *number*: stop with it.

        *asked*: because we were asked to stop. Returns, when continued, after how many seconds the agent is
        to be continued; None when it is not our affair.
        """
        if not self.controls and not asked:
            return None  # somebody stopped it by hand: they will continue it
        wanted = number in (signal.SIGTTIN, signal.SIGTTOU)
        if self.given is None and wanted and self.give(group):
            return 0.0  # it only wanted the terminal
        had = self.given is not None
        self.take()
        before = time.monotonic()
        suspend(number)
        if (had or wanted) and self.give(group):
            return 0.0
        # Nobody could stop us, nor give us the terminal that the agent asks for: it would stop again at once.
        return 1.0 if wanted and time.monotonic() - before < 0.1 else 0.0

    def close(self) -> None:
        """Take back what was given, and SIGTTOU too."""
        self.take()
        if self.controls and self._ttou is not None:
            signal.signal(signal.SIGTTOU, self._ttou)
            self.controls = False


def suspend(number: int = signal.SIGTSTP) -> None:
    """Stop our own process group as job control would. Returns when continued (at once if nobody could)."""
    if number not in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        number = signal.SIGTSTP  # SIGSTOP would stop us even where nobody could continue us
    held = signal.signal(number, signal.SIG_DFL)
    try:
        os.kill(0, number)
    finally:
        signal.signal(number, held)
