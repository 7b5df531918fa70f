"""The examples of docs/api.md, run one after the other in a shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.processes import started

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.mark.check_all
def test_the_examples_do_what_they_say(dsn: str, home: Path) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with started(dsn, home):
        environment = os.environ | {"DATABASE_URL": dsn, "PATH": path}
        run = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script], env=environment, cwd=home, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    for said in ('"id": "ticket-7"', '"was": "queued"', '"taken_by": null', '"recoveries": 0', "event: run"):
        assert said in run.stdout, run.stdout
