"""The example agents through a minute of a nemesis (bench.nemesis; ten of them: `make proof-nemesis`)."""

import subprocess
import sys

import pytest

from sandbox.client import PROJECT


@pytest.mark.check_all
def test_a_minute_of_it() -> None:
    words = [sys.executable, "-m", "bench.nemesis", "--seconds", "60", "--runs", "3", "--seed", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=PROJECT)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
