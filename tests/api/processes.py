"""API processes on one database, as they are really started."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.api import keys
from runtime.folder import hold_port

ROOT = Path(__file__).resolve().parents[2]
AGENTS = {"a": {"command": ["true"]}, "refund": {"command": ["true"], "input_schema": {"type": "object"}}}


@dataclass
class Process:
    """One of them."""

    url: str
    key: str
    log: Path


@contextlib.contextmanager
def started(dsn: str, folder: Path, **settings: Any) -> Iterator[Process]:
    """An API process whose state is in *folder*."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"agents": AGENTS} | settings))
    with hold_port(0) as held:
        port = held.getsockname()[1]
        log = folder / "api.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "proxy.api", "--folder", str(folder), "--port", str(port)],
                cwd=ROOT,
                env=os.environ | {"DATABASE_URL": dsn, "TWICESHY_CONFIG": str(folder / "settings.json")},
                stderr=out,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait(process, url, log)
            yield Process(url, keys.read(keys.key_file(folder)) or "", log)
        finally:
            process.terminate()
            assert process.wait(20) == 0, log.read_text()


def wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until it answers."""
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
