"""The README's agents of one's own, typed in as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.folder import hold_port

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.check_all
def test_the_first_agents_do_what_they_say(dsn: str, home: Path) -> None:
    with hold_port(0) as held:
        port = held.getsockname()[1]
    text = README.read_text("utf-8").partition("## An agent of your own")[2].partition("\n## ")[0]
    text = text.replace("8900", str(port)).replace("time.sleep(15)", "")
    for name, program in re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (home / name).write_text(program, "utf-8")
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for typed, done in (
        # The folder is the test's; a person looks twice where a script has to wait.
        ("mkdir -p ../thanks && cd ../thanks", "trap 'kill $(jobs -p); wait' EXIT"),
        ("sandbox.log &\n", "sandbox.log &\nuntil curl -sf localhost:$PORT/orders/A-1001; do :; done\n"),
        ("twiceshy approvals ", "until twiceshy approvals | grep bob-1; do :; done "),
        ("twiceshy show bob-1", "until twiceshy runs --status done | grep bob-1; do :; done; twiceshy show bob-1"),
    ):
        assert typed in script, script
        script = script.replace(typed, done)
    environment = os.environ | {
        "DATABASE_URL": dsn, "PORT": str(port), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    shell = subprocess.run(
        ["timeout", "110", "bash", "-eu", "-o", "pipefail", "-c", script], env=environment, cwd=home,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    said = shell.stdout + shell.stderr
    assert shell.returncode == 0, said
    log = (home / "sandbox.log").read_text("utf-8")
    assert log.count('"effect":"mail"') == 2, said
    assert log.count('"effect":"completion"') == 2, said
    assert re.search(r"^4 .*/email/send", shell.stdout, re.MULTILINE), said
