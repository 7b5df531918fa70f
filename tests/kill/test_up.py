"""``twiceshy up``: the keeper in the foreground, and how it and the one in the background make way."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import folder as state
from tests.kill.processes import ROOT, SOON, STANDIN, asked, changed, everything_ended, kept_open

UP = """
import sys
from runtime.errors import TwiceshyError
from runtime.keeping import up
from runtime.settings import Settings
try:
    sys.exit(up(Settings(), sys.argv[2:], port=int(sys.argv[1])))
except TwiceshyError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@contextlib.contextmanager
def foreground(port: int, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", UP, str(port), *STANDIN, *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: "subprocess.Popen[str]", words: str) -> str:
    """The line of its standard error that has *words*. Ends with the process at the latest."""
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError("".join(lines))


@pytest.fixture
def port() -> int:
    with state.hold_port(0) as held:
        number: int = held.getsockname()[1]
        return number


async def test_up_takes_over_from_the_background_and_gives_way_again(outside: str, home: Path, port: int) -> None:
    async with kept_open() as keeping:
        background = keeping.keeper_pid
        with foreground(port) as process:
            assert f"(pid {background})" in heard(process, "taking over")
            assert f"http://127.0.0.1:{port}, state in {home}" in heard(process, "proxy on")
            await changed(keeping)
            assert (keeping.keeper_pid, keeping.proxy) == (process.pid, f"127.0.0.1:{port}")
            os.kill(keeping.sidecar_pid, signal.SIGKILL)
            await changed(keeping)
            assert keeping.proxy == f"127.0.0.1:{port}"
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
            await asyncio.to_thread(process.wait, SOON)
            assert process.returncode == 0
        await changed(keeping)
        assert keeping.keeper_pid != background
        assert keeping.proxy != f"127.0.0.1:{port}"
    await everything_ended(home)


async def test_up_stays_without_users_and_is_alone(outside: str, home: Path, port: int) -> None:
    with foreground(port) as process:
        heard(process, "proxy on")
        async with kept_open() as keeping:
            assert keeping.keeper_pid == process.pid
        with foreground(port) as second:
            assert f"running already for {home} (pid {process.pid})" in heard(second, "running already")
            assert second.wait(SOON) == 2
        async with kept_open() as again:
            assert again.sidecar == keeping.sidecar
        process.terminate()
        assert await asyncio.to_thread(process.wait, SOON) == 0
    await everything_ended(home)


async def test_up_ends_without_more_words_while_it_has_users(outside: str, home: Path, port: int) -> None:
    with foreground(port) as process:
        heard(process, "proxy on")
        held = state.connect(home / "keeper.sock")  # somebody who has not said yet what he wants
        assert held is not None
        async with kept_open() as keeping:
            process.terminate()
            out = (await asyncio.to_thread(process.communicate, timeout=SOON))[1]
            assert (process.returncode, out.splitlines()[-1].partition(": ")[2]) == (0, "ended")
            assert "Traceback" not in out, out
            await changed(keeping)
        held.close()
    await everything_ended(home)


async def test_up_says_when_its_port_is_taken_and_ends_nothing_for_it(outside: str, home: Path) -> None:
    async with kept_open() as keeping:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            with foreground(taken) as process:
                heard(process, f"port {taken} on 127.0.0.1: Address already in use")
                assert process.wait(SOON) == 2
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid


async def test_up_ends_with_2_when_its_sidecar_cannot_start(outside: str, home: Path, port: int) -> None:
    with foreground(port, "fail") as process:
        heard(process, "no luck today")
        heard(process, "did not start (exit 3)")
        assert process.wait(SOON) == 2


async def test_up_ends_with_2_when_the_database_is_away(home: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    with foreground(port) as process:
        heard(process, "127.0.0.1:1/none")
        assert process.wait(SOON) == 2
