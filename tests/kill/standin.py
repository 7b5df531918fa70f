"""Stands in for the sidecar: prints the line, listens on its port, answers each connection with what it knows.

    standin.py [WORD…] --folder F --port P [--host H]

WORD: ``fail`` (ends at once with words), ``mute`` (never says its line), ``once`` (fails when started again),
``late`` (fails when started first), ``away`` and ``killed`` (the same, for want of a database, and by a signal),
``deaf`` (ignores SIGTERM), ``slow`` (takes a second to end).
"""

import json
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path


def main() -> None:
    words = sys.argv[1 : sys.argv.index("--folder")]
    rest = sys.argv[sys.argv.index("--folder") :]
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    folder = Path(options["--folder"])
    if "fail" in words:
        print("no luck today", file=sys.stderr)
        sys.exit(3)
    if "mute" in words:
        signal.pause()
    if "once" in words:
        mark = folder / "was-here"
        if mark.exists():
            sys.exit(4)
        mark.touch()
    for word, ends in (("late", lambda: sys.exit(5)), ("away", lambda: sys.exit(os.EX_TEMPFAIL)), ("killed", die)):
        mark = folder / word
        if word in words and not mark.exists():
            mark.touch()
            ends()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else lambda *_: end(1.0 if "slow" in words else 0))
    listener = socket.create_server((options.get("--host", "127.0.0.1"), int(options["--port"])))
    print("starting")  # not the line: goes to the log
    print(json.dumps({"id": uuid.uuid4().hex, "port": listener.getsockname()[1]}), flush=True)
    print("running", flush=True)
    known = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "settings": json.loads(Path(os.environ["TWICESHY_CONFIG"]).read_text("utf-8")),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)),
    }
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(known).encode())


def end(seconds: float) -> None:
    print("ending", flush=True)
    time.sleep(seconds)
    sys.exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_open(fd: str) -> bool:
    try:
        os.fstat(int(fd))
    except OSError:
        return False
    return True


main()
