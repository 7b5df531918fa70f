"""Forty refunds with approvals under chaos (bench.chaos; two hundred: `make proof-chaos`)."""

import subprocess
import sys

import pytest

from sandbox.client import PROJECT


@pytest.mark.check_all
def test_forty_tickets() -> None:
    words = [sys.executable, "-m", "bench.chaos", "--tickets", "40", "--seed", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=PROJECT)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
