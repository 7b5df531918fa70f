"""What a launcher says, on standard error: the agent's own output is never touched. Shell."""

import sys
from typing import TextIO


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

    def _write(self, text: str) -> None:
        try:
            for line in text.splitlines():
                self.stream.write(f"twiceshy: {line}\n")
            self.stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads us: no reason to stop an agent
