"""What a launcher says, on standard error: the agent's own output is never touched. Shell."""

import asyncio
import sys
from collections.abc import Awaitable
from typing import TextIO, TypeVar

T = TypeVar("T")
#: Who looks at a terminal that says nothing for longer thinks that it hangs.
SILENT = 2.0


class Voice:
    """Speaks at a terminal; elsewhere only when something happened. ``quiet`` even there."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.chatty = not quiet and self.stream.isatty()
        self.spoke = False

    def say(self, text: str) -> None:
        """Something happened that a person or a log wants to know."""
        self.spoke = True
        self._write(text)

    def tell(self, text: str) -> None:
        """All is well: said at a terminal only."""
        if self.chatty:
            self._write(text)

    async def while_opening(self, opening: Awaitable[T], silent: float = SILENT) -> T:
        """What *opening* brings: sidecar and database. One that takes a while is told of."""
        words = "sidecar and database are being started, which takes longest the first time"
        telling = asyncio.get_running_loop().call_later(silent, self.tell, words)
        try:
            return await opening
        finally:
            telling.cancel()

    def _write(self, text: str) -> None:
        try:
            for line in text.splitlines():
                self.stream.write(f"twiceshy: {line}\n")
            self.stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads us: no reason to stop an agent
