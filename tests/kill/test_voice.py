"""What a launcher says at a terminal while it waits itself."""

import asyncio
import io

from runtime.launch.voice import Voice


class Terminal(io.StringIO):
    """One that tells when something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


async def test_a_start_that_takes_a_while_is_told_of() -> None:
    terminal = Terminal()
    assert await asyncio.wait_for(Voice(stream=terminal).while_opening(terminal.written.wait(), silent=0.0), 10)
    assert terminal.getvalue().count("\n") == 1
    assert "are being started" in terminal.getvalue()


async def test_a_quick_one_is_not() -> None:
    terminal = Terminal()
    terminal.written.set()
    assert await Voice(stream=terminal).while_opening(terminal.written.wait(), silent=0.0)
    await asyncio.sleep(0)
    assert terminal.getvalue() == ""
