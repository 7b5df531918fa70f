"""Asks for a name that only the sidecar knows, by the clients that an agent has. Shell.

In the agent's own interpreter, started as the agent will be, with the agent's environment; where that is none that we
know, by curl.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.launch.diagnosis import Probe, probe
from runtime.launch.interpreters import interpreter

SITE = Path(__file__).with_name("site")
#: Names below the doctor's: what happens to probes is not what happens to the agent.
HOST = "probe.doctor.twiceshy.internal"
#: Seconds for all probes together; each client gives up before.
WITHIN = 25.0
_MARK = b"twiceshy-probe "
_CURL = ("curl", "-sS", "--max-time", "10")


async def ask(
    command: Sequence[str], environment: Mapping[str, str], *, run: str, sidecar: str
) -> tuple[str, list[Probe]]:
    """Who asked, in words, and what became of it. Neither: there is nobody here who could."""
    found = interpreter(command, shutil.which, _first_line)
    if found is None:
        if shutil.which(_CURL[0]) is None:
            return "", []
        asked = [await _curl(scheme, environment) for scheme in ("http", "https")]
        return "curl, for the program's interpreter is none that is known", [
            probe(told, run=run, sidecar=sidecar) for told in asked
        ]
    text = (SITE / {"python": "probe.py", "node": "probe.cjs"}[found.kind]).read_text("utf-8")
    option = {"python": "-c", "node": "-e"}[found.kind]
    _, output, error = await _run([*found.words, option, text, HOST], environment)
    told = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    who = next((f"{each['interpreter']} ({each['path']})" for each in told if "interpreter" in each), "")
    probes = [probe(each, run=run, sidecar=sidecar) for each in told if "client" in each]
    if not probes:
        said = error.decode("utf-8", "replace").strip().splitlines()
        words = said[-1] if said else f"nothing was said within {WITHIN:g} s"
        probes = [probe({"client": found.kind, "error": words}, run=run, sidecar=sidecar)]
    return who or " ".join(found.words), probes


async def _curl(scheme: str, environment: Mapping[str, str]) -> dict[str, Any]:
    code, output, error = await _run([*_CURL, f"{scheme}://{HOST}/"], environment)
    told = {"client": "curl", "scheme": scheme}
    return told | ({"answer": output.decode("utf-8", "replace")} if code == 0 else {"error": error.decode()})


async def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, output, errors. Whoever takes longer than ``WITHIN`` is killed, and what he said is lost."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return 127, b"", str(error).encode()
    try:
        output, said = await asyncio.wait_for(process.communicate(), WITHIN)
    except TimeoutError:
        return 124, b"", b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, output, said


def _first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.readline(1000).decode("utf-8", "replace").strip()
    except OSError:
        return ""
