"""How the demo speaks: colour where the terminal has it, and the model's words on one line as they come."""

import os
import sys
import threading
from typing import TextIO

RED, GREEN, YELLOW, DIM, BOLD = "31", "32", "33", "2", "1"
WIDTH = 96


class Screen:
    """Writes whole lines, from several threads."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._column = 0  # within a line of streamed words; 0: at the start of a line
        wanted = os.environ.get("FORCE_COLOR") or (out.isatty() and os.environ.get("TERM") != "dumb")
        self._colour = bool(wanted) and not os.environ.get("NO_COLOR")

    def paint(self, text: str, *codes: str) -> str:
        """*text* in these colours."""
        return f"\033[{';'.join(codes)}m{text}\033[0m" if self._colour and codes and text else text

    def say(self, text: str = "", *codes: str) -> None:
        """One line or several."""
        with self._lock:
            self._break()
            for line in text.split("\n"):
                self._out.write(self.paint(line, *codes) + "\n")
            self._out.flush()

    def echo(self, line: str) -> None:
        """A line that a program wrote; streamed words (they begin with …) go on the same line."""
        with self._lock:
            words = line.strip()
            if words.startswith("…"):
                words = words.removeprefix("…").strip() + " "
                if self._column + len(words) > WIDTH:
                    self._break()
                if self._column == 0:
                    self._out.write(self.paint("   │   ", DIM))
                self._out.write(self.paint(words, YELLOW))
                self._column += len(words)
            else:
                self._break()
                self._out.write(self.paint(f"   │ {line}", DIM) + "\n")
            self._out.flush()

    def _break(self) -> None:
        if self._column:
            self._out.write("\n")
            self._column = 0
