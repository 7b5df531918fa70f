"""How a program ends that is told to: parked quietly, else with the reason, and never by a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.launch.environment import environment
from tests.conftest import fresh_database
from tests.stack import PROJECT, Stack, stack

#: Each waits for ever, in its own way, and would say so if it went on.
WAITS = {
    "plain": """
try:
    twiceshy.wait_event("never")
except Exception:
    print("swallowed")
print("went on")
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as threads:
    list(threads.map(twiceshy.wait_event, ["a", "b", "c"]))
print("went on")
""",
    "a thread": """
import threading
thread = threading.Thread(target=twiceshy.wait_event, args=("a",))
thread.start()
thread.join()
twiceshy.sleep(600)
print("went on")
""",
    "awaited": """
import asyncio
asyncio.run(aio.wait_event("a"))
print("went on")
""",
    "gathered": """
import asyncio
async def main():
    try:
        await asyncio.gather(aio.wait_event("a"), aio.sleep(600), aio.wait_event("b"), return_exceptions=True)
    except Exception:
        print("swallowed")
    print("went on")
asyncio.run(main())
""",
    "a group": """
import asyncio
async def main():
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(aio.wait_event(name))
    print("went on")
asyncio.run(main())
""",
    "an agent": """
@twiceshy.agent
async def main(given):
    await aio.step("a", int)
    await aio.wait_event("a")
    print("went on")
main.main()
""",
}


@pytest.fixture(scope="module")
def quick_stack(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    databases = fresh_database(server, template)
    with stack(next(databases), tmp_path_factory.mktemp("stack"), hold=0.1, park_quiet=0.1, poll=0.1) as made:
        yield made
    next(databases, None)


def start(made: Stack, run: str, program: str) -> "subprocess.Popen[str]":
    attempt = made.claim(run)
    assert attempt.token is not None
    given = environment(os.environ, run=run, token=attempt.token, proxy=f"127.0.0.1:{attempt.port}")
    return subprocess.Popen(
        [sys.executable, "-c", "import twiceshy\nfrom twiceshy import aio\n" + program],
        env=given | {"PYTHONPATH": str(PROJECT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # who works is seen by process groups
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it does not end: {process.communicate()}") from None
    return process.returncode, out, err


@pytest.mark.check_all
def test_who_is_parked_ends_quietly(quick_stack: Stack, run: str) -> None:
    started = {name: start(quick_stack, f"{run}-{n}", text) for n, (name, text) in enumerate(WAITS.items())}
    assert {name: ended(process) for name, process in started.items()} == dict.fromkeys(WAITS, (75, "", ""))


@pytest.mark.check_all
def test_who_is_fenced_says_why(quick_stack: Stack, run: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = f"twiceshy.now(); open({str(begun)!r}, 'w').close()\nwhile True: twiceshy.random()"
    process = start(quick_stack, run, program)
    quick_stack.sandbox.wait_for(begun.exists, what="it began")
    quick_stack.claim(run)
    code, out, err = ended(process)
    assert (code, out) == (1, "")
    assert run in err
    assert "Traceback" not in err


def test_a_program_that_was_started_without_says_how_to_start_it() -> None:
    kept: dict[str, Any] = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = [sys.executable, "-c", "import twiceshy; twiceshy.now()"]
    done = subprocess.run(command, env=kept | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Start it with `twiceshy run -- python agent.py`" in done.stderr.splitlines()[-1]
