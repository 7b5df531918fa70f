"""The keeper with real processes, killed one by one. ``standin.py`` plays the sidecar."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from runtime import folder as state
from runtime import kept
from runtime.errors import DatabaseAway, UsageError
from runtime.keeping import Keeping
from runtime.settings import Settings
from tests.conftest import NOBODY, scratch

ROOT = Path(__file__).resolve().parents[2]
STANDIN = [sys.executable, str(Path(__file__).with_name("standin.py"))]
SOON = 30.0


@pytest.fixture
def outside(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A state folder that uses the session's server: no initdb."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    return dsn


@asynccontextmanager
async def kept_open(*words: str, **settings: Any) -> AsyncIterator[Keeping]:
    async with await Keeping.open(Settings.model_validate(settings), [*STANDIN, *words]) as keeping:
        yield keeping


async def until(what: Callable[[], Any]) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def changed(keeping: Keeping) -> None:
    await asyncio.wait_for(keeping.changed(), SOON)


async def asked(keeping: Keeping) -> dict[str, Any]:
    """What the sidecar knows of itself."""
    reader, writer = await asyncio.open_connection(*keeping.proxy.split(":"))
    said: dict[str, Any] = json.loads(await reader.read())
    writer.close()
    return said


def below(folder: Path) -> list[int]:
    """The processes that name *folder* in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if bytes(folder) in path.read_bytes() and pid != os.getpid() and lives(pid):
                found.append(pid)
    return found


async def everything_ended(folder: Path) -> None:
    await until(lambda: not state.Lock(folder / "keeper.lock").held())
    await until(lambda: not below(folder))


def postgres_pid(home: Path) -> int:
    return int((home / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])


# ---- what is started, and with what


async def test_the_sidecar_gets_what_it_needs_and_nothing_else(
    outside: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("TWICESHY_TOKEN", "a run's")
    monkeypatch.setenv("TWICESHY_LEASE", "7")  # stands in the settings that are handed over
    monkeypatch.setenv("TWICESHY_FAILPOINT", "somewhere")
    monkeypatch.setenv("HTTP_PROXY", "http://ourselves")
    async with kept_open(lease=5.0) as keeping:
        known = await asked(keeping)
        assert (known["pid"], known["parent"]) == (keeping.sidecar_pid, keeping.keeper_pid)
        given = known["environment"]
        assert given["DATABASE_URL"] == outside == keeping.dsn
        assert given["PATH"] == os.environ["PATH"]
        assert given["TWICESHY_HOME"] == str(home) == str(keeping.folder)
        assert given["TWICESHY_FAILPOINT"] == "somewhere"
        assert not {"OPENAI_API_KEY", "TWICESHY_TOKEN", "TWICESHY_LEASE", "HTTP_PROXY"} & given.keys()
        assert known["settings"]["lease"] == 5.0
        # Standard three, its listener, the keeper's lock.
        inherited = [each for each in known["descriptors"] if not each.startswith(("pipe:", "socket:", "/dev/null"))]
        assert sorted(set(inherited)) == [str(home / "keeper.lock"), str(Path(known["arguments"][1]) / "sidecar.log")]
        # Neither it nor the keeper is reached by Ctrl-C in this terminal.
        assert len({known["session"], os.getsid(keeping.keeper_pid), os.getsid(0)}) == 3
        log = Path(known["arguments"][1]) / "sidecar.log"
        await until(lambda: log.read_text().splitlines() == ["starting", "running"])
    await everything_ended(home)
    assert not (home / "keeper.sock").exists()


async def test_all_users_share_one_and_the_last_one_gone_everything_ends(home: Path) -> None:
    """With embedded Postgres: nothing of it stays either."""
    first, second = await asyncio.gather(
        Keeping.open(Settings(), STANDIN), Keeping.open(Settings(), STANDIN), return_exceptions=False
    )
    assert (first.keeper_pid, first.sidecar, first.proxy) == (second.keeper_pid, second.sidecar, second.proxy)
    connection = await asyncpg.connect(first.dsn)
    assert await connection.fetchval("SELECT count(*) FROM twiceshy.run") == 0
    await connection.close()
    server = postgres_pid(home)
    await first.close()
    # Were the second not counted, it would be over after the grace.
    await until(lambda: Path(f"/proc/{second.keeper_pid}/stat").exists())
    assert (await asked(second))["pid"] == second.sidecar_pid
    await second.close()
    await everything_ended(home)
    assert not lives(server)
    log = (home / "postgres.log").read_text()
    assert "database system is shut down" in log.splitlines()[-1]


USER = """
import asyncio, sys
from runtime.keeping import Keeping
from runtime.settings import Settings
async def main():
    keeping = await Keeping.open(Settings(), sys.argv[1:])
    print(keeping.keeper_pid, keeping.sidecar_pid, flush=True)
    while True:
        await keeping.changed()
        print(keeping.keeper_pid, keeping.sidecar_pid, flush=True)
asyncio.run(main())
"""


async def test_users_that_are_killed_are_gone_and_the_keeper_is_no_child_of_theirs(outside: str, home: Path) -> None:
    users = [
        subprocess.Popen([sys.executable, "-c", USER, *STANDIN], cwd=ROOT, stdout=subprocess.PIPE, process_group=0)
        for _ in range(2)
    ]
    said = [await asyncio.to_thread(_line, user) for user in users]
    assert said[0] == said[1]
    keeper, sidecar = said[0]
    # The whole group of the one that may have started it.
    for user in users[:1]:
        os.killpg(user.pid, signal.SIGINT)
        os.killpg(user.pid, signal.SIGKILL)
        user.communicate()
    async with kept_open() as third:
        assert (third.keeper_pid, third.sidecar_pid) == (keeper, sidecar)
        users[1].kill()
        users[1].communicate()
        assert lives(keeper)
    await everything_ended(home)
    assert not lives(keeper)


def _line(user: "subprocess.Popen[bytes]") -> tuple[int, ...]:
    assert user.stdout
    return tuple(map(int, user.stdout.readline().split()))


# ---- deaths


async def test_a_killed_sidecar_comes_back_on_its_port(outside: str, home: Path) -> None:
    async with kept_open() as keeping, kept_open() as other:
        before = (keeping.sidecar, keeping.sidecar_pid)
        keeper, proxy = keeping.keeper_pid, keeping.proxy
        for _ in range(3):
            os.kill(keeping.sidecar_pid, signal.SIGKILL)
            await changed(keeping)
            await changed(other)
            assert (keeping.sidecar, keeping.sidecar_pid) != before
            assert other.sidecar == keeping.sidecar
            assert (keeping.keeper_pid, keeping.proxy) == (keeper, proxy)
            assert (await asked(keeping))["pid"] == keeping.sidecar_pid
            before = (keeping.sidecar, keeping.sidecar_pid)


async def test_a_change_between_two_looks_is_not_missed(outside: str, home: Path) -> None:
    async with kept_open() as keeping, kept_open() as other:
        known = keeping.sidecar
        os.kill(keeping.sidecar_pid, signal.SIGKILL)
        await changed(other)
        assert keeping.sidecar == known  # as its owner knows it
        await changed(keeping)
        assert keeping.sidecar == other.sidecar != known
        os.kill(keeping.sidecar_pid, signal.SIGKILL)
        await changed(other)
        await asyncio.wait_for(keeping.ready(), SOON)
        assert keeping.sidecar == other.sidecar


async def test_after_a_killed_keeper_one_of_its_users_starts_the_next(home: Path) -> None:
    async with kept_open() as keeping, kept_open() as other:
        connection = await asyncpg.connect(keeping.dsn)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
        await connection.close()
        for _ in range(2):
            keeper, sidecar, server = keeping.keeper_pid, keeping.sidecar_pid, postgres_pid(home)
            dsn, proxy = keeping.dsn, keeping.proxy
            os.kill(keeper, signal.SIGKILL)
            await changed(keeping)
            await changed(other)
            assert keeping.keeper_pid == other.keeper_pid != keeper
            assert (keeping.dsn, keeping.proxy) == (dsn, proxy)
            # The successor began after all that its predecessor had started was gone.
            assert not lives(sidecar)
            assert not lives(server)
            connection = await asyncpg.connect(keeping.dsn)
            assert await connection.fetchval("SELECT n FROM kept") == 42
            await connection.close()
    await everything_ended(home)


async def test_postgres_dying_alone_leaves_the_sidecar_alone(home: Path) -> None:
    async with kept_open() as keeping:
        connection = await asyncpg.connect(keeping.dsn)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
        for signum in (signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM):
            server = postgres_pid(home)
            os.kill(server, signum)
            connection.terminate()
            connection = await _connection(keeping.dsn)
            assert await connection.fetchval("SELECT n FROM kept") == 42
            assert postgres_pid(home) != server
        await connection.close()
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid
        assert lives(keeping.keeper_pid)


async def _connection(dsn: str) -> asyncpg.Connection:
    end = time.monotonic() + SOON
    while True:
        try:
            return await asyncpg.connect(dsn)
        except (OSError, asyncpg.PostgresError):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


async def test_a_keeper_asked_to_end_drains_and_is_succeeded(outside: str, home: Path) -> None:
    async with kept_open() as keeping:
        keeper, sidecar = keeping.keeper_pid, keeping.sidecar_pid
        os.kill(keeper, signal.SIGTERM)
        await changed(keeping)
        assert keeping.keeper_pid != keeper
        assert not lives(sidecar)


# ---- rules and databases


async def test_other_settings_get_a_sidecar_of_their_own_on_the_same_database(outside: str, home: Path) -> None:
    async with kept_open() as keeping:
        async with kept_open(poll=0.5) as other:
            assert other.keeper_pid == keeping.keeper_pid
            assert other.sidecar != keeping.sidecar
            assert other.folder == keeping.folder
            ended = other.sidecar_pid
            assert (await asked(other))["settings"]["poll"] == 0.5
        await until(lambda: not lives(ended))
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid
        async with kept_open(poll=0.5) as again:
            assert again.sidecar_pid != ended
            assert again.proxy == other.proxy


async def test_a_folder_serves_one_database(
    outside: str, empty_dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept_open():
        monkeypatch.setenv("DATABASE_URL", empty_dsn)
        with pytest.raises(UsageError, match="serves another database"):
            await Keeping.open(Settings(), STANDIN)


async def test_the_database_is_migrated_first(empty_dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_dsn)
    async with kept_open() as keeping:
        connection = await asyncpg.connect(keeping.dsn)
        assert await connection.fetchval("SELECT count(*) FROM twiceshy.installation") == 1
        await connection.close()


def test_folders_go_by_database_and_never_by_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs of embedded Postgres must be found after an edit of the rule file."""
    monkeypatch.delenv("TWICESHY_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state.state_folder(None) == tmp_path / "twiceshy" / "embedded"
    one, two = state.state_folder("postgresql://a/b"), state.state_folder("postgresql://a/c")
    assert len({one, two, state.state_folder(None)}) == 3
    monkeypatch.setenv("PGHOST", "elsewhere")
    assert state.state_folder("postgresql://a/b") != one
    monkeypatch.setenv("TWICESHY_HOME", "somewhere")
    assert state.state_folder("postgresql://a/b") == Path.cwd() / "somewhere"


# ---- what goes wrong


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", DatabaseAway, r"127\.0\.0\.1:1/none"),
        ("mysql://x/y", UsageError, "mysql://x/y"),
    ],
)
async def test_a_wrong_database_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, url: str, kind: type[Exception], words: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(kind, match=words):
        await Keeping.open(Settings(), STANDIN)
    await everything_ended(home)


async def test_a_sidecar_that_does_not_come_up_is_said_with_its_words(outside: str, home: Path) -> None:
    with pytest.raises(UsageError, match=r"did not start \(exit 3\): no luck today \(see .*sidecar.log\)"):
        await Keeping.open(Settings(), [*STANDIN, "fail"])
    with pytest.raises(UsageError, match=r"cannot be started: .*No such file"):
        await Keeping.open(Settings(), ["/no/such/program"])
    async with kept_open():  # the same keeper may still be there, and serves
        pass
    await everything_ended(home)


async def test_one_that_cannot_come_back_is_tried_again_and_again(outside: str, home: Path) -> None:
    async with kept_open("once") as keeping:
        mark = Path((await asked(keeping))["arguments"][2]) / "was-here"
        os.kill(keeping.sidecar_pid, signal.SIGKILL)
        await until(lambda: "did not start (exit 4)" in (home / "keeper.log").read_text())
        await until(lambda: keeping.trouble)
        assert "exit 4" in (keeping.trouble or "")
        mark.unlink()
        await changed(keeping)
        assert keeping.trouble is None


async def test_a_client_can_go_while_all_starts(outside: str, home: Path) -> None:
    opening = asyncio.create_task(Keeping.open(Settings(), [*STANDIN, "mute"]))
    await until(lambda: any("standin" in _command(pid) for pid in below(home)))
    opening.cancel()
    await asyncio.wait({opening})
    await everything_ended(home)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_a_sidecar_that_does_not_drain_is_killed(
    outside: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "DRAIN_MARGIN", 0.2)
    lock = state.Lock(home / "keeper.lock")
    assert lock.take()
    assert lock.fd
    up = asyncio.Event()
    wanted = kept.Wanted({"drain": 0.1}, [*STANDIN, "deaf"], {})
    sidecar = kept.KeptSidecar(home, wanted, outside, lock.fd, kept.Children(), lambda _: up.set())
    await asyncio.wait_for(up.wait(), SOON)
    assert sidecar.running
    pid = sidecar.running.pid
    await asyncio.wait_for(sidecar.end(), SOON)
    assert not lives(pid)
    lock.release()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


async def test_the_keepers_lock_is_free_only_when_its_sidecars_are_dead(home: Path) -> None:
    lock = state.Lock(home / "some.lock")
    assert lock.take()
    assert lock.fd
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    lock.release()
    other = state.Lock(home / "some.lock")
    assert not other.take()
    assert other.held()
    assert other.owner() == str(os.getpid())
    child.kill()
    child.wait()
    assert not other.held()
    assert other.take()
    other.release()


async def test_a_socket_path_of_any_length(outside: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / ("d" * 100) / ("e" * 100)
    monkeypatch.setenv("TWICESHY_HOME", str(deep))
    async with kept_open() as keeping:
        assert keeping.folder == deep
        assert (deep / "keeper.sock").is_socket()
        assert (deep / "keeper.sock").stat().st_mode & 0o777 == 0o600
        async with kept_open() as other:
            assert other.keeper_pid == keeping.keeper_pid
    await everything_ended(deep)


async def test_a_folder_that_cannot_be_made_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("TWICESHY_HOME", str(home / "file" / "below"))
    with pytest.raises(UsageError, match="set TWICESHY_HOME"):
        await Keeping.open(Settings(), STANDIN)


# ---- in the foreground

UP = """
import sys
from runtime.errors import TwiceshyError
from runtime.keeping import up
from runtime.settings import Settings
try:
    sys.exit(up(Settings(), sys.argv[2:], port=int(sys.argv[1])))
except TwiceshyError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@contextlib.contextmanager
def foreground(port: int, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", UP, str(port), *STANDIN, *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: "subprocess.Popen[str]", words: str) -> str:
    """The line of its standard error that has *words*. Ends with the process at the latest."""
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError("".join(lines))


@pytest.fixture
def port() -> int:
    with state.hold_port(0) as held:
        number: int = held.getsockname()[1]
        return number


async def test_up_takes_over_from_the_background_and_gives_way_again(outside: str, home: Path, port: int) -> None:
    async with kept_open() as keeping:
        background = keeping.keeper_pid
        with foreground(port) as process:
            assert f"(pid {background})" in heard(process, "taking over")
            assert f"http://127.0.0.1:{port}, state in {home}" in heard(process, "proxy on")
            await changed(keeping)
            assert (keeping.keeper_pid, keeping.proxy) == (process.pid, f"127.0.0.1:{port}")
            os.kill(keeping.sidecar_pid, signal.SIGKILL)
            await changed(keeping)
            assert keeping.proxy == f"127.0.0.1:{port}"
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
            await asyncio.to_thread(process.wait, SOON)
            assert process.returncode == 0
        await changed(keeping)
        assert keeping.keeper_pid != background
        assert keeping.proxy != f"127.0.0.1:{port}"
    await everything_ended(home)


async def test_up_stays_without_users_and_is_alone(outside: str, home: Path, port: int) -> None:
    with foreground(port) as process:
        heard(process, "proxy on")
        async with kept_open() as keeping:
            assert keeping.keeper_pid == process.pid
        with foreground(port) as second:
            assert f"running already for {home} (pid {process.pid})" in heard(second, "running already")
            assert second.wait(SOON) == 2
        async with kept_open() as again:
            assert again.sidecar == keeping.sidecar
        process.terminate()
        assert await asyncio.to_thread(process.wait, SOON) == 0
    await everything_ended(home)


async def test_up_says_when_its_port_is_taken_and_ends_nothing_for_it(outside: str, home: Path) -> None:
    async with kept_open() as keeping:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            with foreground(taken) as process:
                heard(process, f"port {taken} on 127.0.0.1: Address already in use")
                assert process.wait(SOON) == 2
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid


async def test_up_ends_with_2_when_its_sidecar_cannot_start(outside: str, home: Path, port: int) -> None:
    with foreground(port, "fail") as process:
        heard(process, "no luck today")
        heard(process, "did not start (exit 3)")
        assert process.wait(SOON) == 2


async def test_up_ends_with_2_when_the_database_is_away(home: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    with foreground(port) as process:
        heard(process, "127.0.0.1:1/none")
        assert process.wait(SOON) == 2


# ---- another user


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: the other tests show the ordinary user")
async def test_an_ordinary_user_keeps_for_himself(python_of_nobody: str) -> None:
    with scratch("ts-") as home:
        os.chown(home, NOBODY, NOBODY)
        standin = shutil.copy(STANDIN[1], home)
        given = {
            "TWICESHY_HOME": str(home),
            "PATH": os.defpath,
            "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [python_of_nobody, "-c", USER, python_of_nobody, standin]
        as_nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": given, "cwd": "/"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, **as_nobody) as user:
            keeper, sidecar = await asyncio.to_thread(_line, user)
            for pid in (keeper, sidecar, postgres_pid(home)):
                assert Path(f"/proc/{pid}").stat().st_uid == NOBODY
            os.kill(keeper, signal.SIGKILL)
            successor, _ = await asyncio.to_thread(_line, user)
            assert successor != keeper
            user.kill()
        await everything_ended(home)
