"""What signals, Ctrl-C and Ctrl-Z mean while an agent runs. Shell.

* INT, QUIT, TERM, HUP sent to the launcher are passed on to the agent's group. After all but INT the agent
  is ended by force once a grace is over; INT is the agent's to answer, an interactive one may go on.
* At a terminal that was handed over, Ctrl-C and Ctrl-\\ reach the agent's group only. Its guardian reports
  them, and Ctrl-C is given to our own group too, as the terminal would have done: a script around us stops.
* An end soon after an interruption is an interruption, whatever the exit code: the run stays resumable, and
  running it again costs a replay. Taking it for *done* could lose work.
* What was ignored when we were started (``nohup``) stays ignored.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter

from runtime.launch.agent import Agent, Exit
from runtime.launch.terminal import Terminal, suspend

#: Passed on to the agent's group.
PASSED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
#: How long an agent may take to end after a signal, in seconds.
GRACE = 10.0


class Signals:
    """Routes signals between launcher, terminal and the agent of the moment."""

    def __init__(self, terminal: Terminal, ignored: frozenset[int], grace: float = GRACE) -> None:
        self.terminal = terminal
        self.ignored = ignored
        self.grace = grace
        self.agent: Agent | None = None
        #: The attempt (or the wait for the next one) has to end now.
        self.enough = asyncio.Event()
        #: The interruption came by Ctrl-C at the terminal.
        self.by_terminal = False
        self._last: tuple[int, float] | None = None
        self._passed: Counter[int] = Counter()
        self._echo = False
        self._stop_asked = False
        self._resume: asyncio.TimerHandle | None = None  # the agent is stopped, and is continued then
        self._loop = asyncio.get_running_loop()
        self._installed: list[int] = []

    def install(self) -> None:
        """Take the signals over. In the main thread only."""
        handlers = dict.fromkeys(PASSED, self.interrupt) | {signal.SIGTSTP: self._stop, signal.SIGCONT: self._go_on}
        for number, handler in handlers.items():
            if number not in self.ignored:
                self._loop.add_signal_handler(number, handler, number)
                self._installed.append(number)

    def close(self) -> None:
        for number in self._installed:
            self._loop.remove_signal_handler(number)
        self._installed.clear()
        self.terminal.close()

    def leave(self, code: int) -> int:
        """*code*, unless Ctrl-C at the terminal ended us: shells end a loop around us only if we die of it."""
        self.close()
        if self.by_terminal and code == 128 + signal.SIGINT and signal.SIGINT not in self.ignored:
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return code

    @property
    def _running(self) -> Agent | None:
        return self.agent if self.agent is not None and not self.agent.exit.done() else None

    def interrupted_by(self, ended: Exit | None = None) -> int | None:
        """The signal that interrupts the run, if one does. *ended*: how the agent has just ended."""
        if self._last is None:
            return None
        number, when = self._last
        soon = self._loop.time() - when <= self.grace
        if number != signal.SIGINT or ended is None or ended.code in (-number, 128 + number) or soon:
            return number
        return None

    # ---- to the launcher

    def interrupt(self, number: int) -> None:
        """Whoever may end the run (a person, a worker that stops) sends *number*."""
        if number == signal.SIGINT and self._echo:
            self._echo = False
            return
        self._note(number)
        agent = self._running
        if agent is None:
            self.enough.set()
            return
        self._passed[number] += 1
        agent.signal(number)
        if number != signal.SIGINT:
            agent.signal(signal.SIGCONT)

    def _note(self, number: int) -> None:
        self._last = (number, self._loop.time())
        if number != signal.SIGINT:
            self._loop.call_later(self.grace, self.enough.set)

    def _stop(self, number: int) -> None:
        agent = self._running
        if agent is None:
            suspend(number)
            return
        if self._resume is not None:  # Ctrl-Z right after fg: the agent still is stopped
            self._stop_with(agent, number, asked=True)
            return
        self._stop_asked = True  # the launcher stops when its guardian reports that the agent has
        agent.signal(number)

    def _go_on(self, _number: int) -> None:
        """``fg`` after ``bg``: the terminal is ours to hand over now."""
        if agent := self._running:
            self.terminal.offer(agent.group)

    # ---- to the agent's group

    def of_group(self, number: int) -> None:
        """The guardian reports that the group got a signal."""
        if self._passed[number]:
            self._passed[number] -= 1  # ours
            return
        if self.terminal.given is None or number == signal.SIGTERM:
            return  # the agent's own affair
        self._note(number)
        if number == signal.SIGINT:
            self.by_terminal = True
            self._echo = signal.SIGINT not in self.ignored
            with contextlib.suppress(OSError):
                os.kill(0, number)

    def of_stop(self, number: int) -> None:
        """The guardian reports that job control stopped the agent."""
        agent = self._running
        asked, self._stop_asked = self._stop_asked, False
        if agent is not None:
            self._stop_with(agent, number, asked=asked)

    def _stop_with(self, agent: Agent, number: int, *, asked: bool) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        pause = self.terminal.stopped(number, agent.group, asked=asked)
        if pause is not None:
            self._resume = self._loop.call_later(pause, self._continue, agent)

    def _continue(self, agent: Agent) -> None:
        self._resume = None
        agent.signal(signal.SIGCONT)
