"""A Postgres for the session, a fresh database per test, a state folder per test.

The server is ``TWICESHY_TEST_DATABASE_URL`` or ``DATABASE_URL`` when set, else an embedded one per worker
process that the kernel ends together with that process, however it dies.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from runtime.embedded import Postgres
from tests.apart import apart

T = TypeVar("T")

#: The uid of a user without rights, for what root tries as somebody else.
NOBODY = 65534
EXTERNAL = os.environ.get("TWICESHY_TEST_DATABASE_URL") or os.environ.get("DATABASE_URL")
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell sets must not change what a test sees."""
    for name in list(os.environ):
        if name == "DATABASE_URL" or (name.startswith("TWICESHY_") and not name.startswith("TWICESHY_TEST_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The dsn of a server on which databases may be made."""
    if EXTERNAL:
        yield EXTERNAL
        return
    with scratch("twiceshy-tests-") as folder:
        postgres = Postgres(folder, {"fsync": "off", "synchronous_commit": "off", "max_wal_size": "4GB"})
        try:
            yield postgres.start()
        finally:
            postgres.stop()


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """Name of a migrated database that the tests' databases are copied from."""
    from runtime.database import migrate

    name = f"twiceshy_template_{os.getpid()}"
    apart(statement(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
    apart(statement(server, f"CREATE DATABASE {name} TEMPLATE template0"))
    apart(migrate(with_database(server, name)))
    yield name
    apart(statement(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


@pytest.fixture
def empty_dsn(server: str) -> Iterator[str]:
    """A fresh database with nothing in it."""
    yield from fresh_database(server, "template0")


@pytest.fixture
def dsn(server: str, template: str) -> Iterator[str]:
    """A fresh, migrated database."""
    yield from fresh_database(server, template)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short, fresh folder, set as TWICESHY_HOME. A keeper that is still there at the end is a failure."""
    with scratch("ts-") as folder:
        monkeypatch.setenv("TWICESHY_HOME", str(folder))
        yield folder
        left = _still_keeping(folder, patience=15.0)
    assert not left, f"keeper {left} of {folder} did not end"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run id that only this test uses."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)


@pytest.fixture(scope="session")
def python_of_nobody() -> str:
    """A Python that another user may run, and that can read our packages (root's may stand below /root)."""
    packages = ["runtime/__init__.py", sysconfig.get_path("purelib") + "/asyncpg/__init__.py"]
    series = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{series}", f"/usr/local/bin/python{series}"):
        look = ["/bin/sh", "-c", 'test -r "$1" && test -r "$2" && "$3" -c ""', "sh", *packages, python]
        if subprocess.run(look, user=NOBODY, group=NOBODY, extra_groups=[], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    pytest.skip("no Python here that another user may run")


# ---- how


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder that another user may enter (pytest's own may not), removed afterwards.

    Those that a killed session left are removed by the next one: a lock tells which are in use.
    """
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(prefix + "*"):
        with contextlib.suppress(OSError), (old / "in-use").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(0o711)
    with (folder / "in-use.new").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "in-use.new").rename(folder / "in-use")  # locked before it can be found
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fresh_database(server: str, template: str) -> Iterator[str]:
    """A copy of the database *template*, gone at the end."""
    name = f"twiceshy_test_{os.getpid()}_{next(_numbers)}"
    # FILE_COPY (PostgreSQL 15+) would checkpoint twice; the default strategy is the faster one for small templates.
    apart(statement(server, f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield with_database(server, name)
    finally:
        apart(statement(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


def with_database(dsn: str, name: str) -> str:
    """*dsn* with another database."""
    return urlunsplit(urlsplit(dsn)._replace(path="/" + name))


async def statement(dsn: str, sql: str) -> None:
    """Run one statement on a connection of its own."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _still_keeping(folder: Path, patience: float) -> str:
    """Wait for every keeper below *folder* to end. Returns who had to be killed.

    One that nobody has open would end by itself a moment later, and is asked not to wait for that.
    """
    end = time.monotonic() + patience
    asked = False
    for path in folder.rglob("keeper.lock"):
        with path.open() as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pid = path.read_text().strip()
                if time.monotonic() > end:
                    _send(pid, signal.SIGKILL)
                    return pid or "?"
                if not asked and not _is_open(path.with_name("keeper.sock")):
                    asked = True
                    _send(pid, signal.SIGTERM)
                time.sleep(0.02)
    return ""


def _is_open(path: Path) -> bool:
    """Whether somebody has a connection to the Unix socket at *path*."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return any(line[-1] == str(path) and line[5] == "03" for line in lines)


def _send(pid: str, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, ValueError, OSError):
        if b"runtime.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signum)
