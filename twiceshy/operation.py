"""What an operation may have done for it. Pure.

An operation is a generator that yields what is to be done (``Try``, ``Do``, ``Pause``, ``Never``) and is sent what came
of it, or what was raised: so that each is written once, for programs that block as for those with an event loop.
``twiceshy.drive`` carries them out.
"""

from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from twiceshy import wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Try:
    """One request, sent once. Sent back: a ``wire.Reply``. Raises OSError or ``wire.Cut``."""

    ask: wire.Ask
    again: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, outside of the journal."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Do:
    """Call *work*; a coroutine's result where it makes one. *permit*: of the step that is being done."""

    work: Callable[[], Any]
    permit: Any
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Never:
    """Wait until the task is cancelled. Where there is none, go on at once."""


Operation: TypeAlias = Generator[Try | Pause | Do | Never, Any, T]

#: The permit of the step that is being done here: in this thread, this task, and the tasks that it starts.
PERMIT: ContextVar[Any] = ContextVar("twiceshy_permit", default=None)
