"""The keeper with real processes, killed one by one. ``standin.py`` plays the sidecar."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from runtime import folder as state
from runtime import keeper, kept
from runtime.errors import DatabaseAway, UsageError
from runtime.keeping import Keeping
from runtime.settings import Settings
from tests.conftest import NOBODY, scratch
from tests.kill.processes import (
    ROOT,
    SOON,
    STANDIN,
    asked,
    below,
    changed,
    command,
    everything_ended,
    kept_open,
    lives,
    postgres_pid,
    until,
)

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


@pytest.mark.check_all
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


@pytest.mark.check_all
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


@pytest.mark.check_all
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


@pytest.mark.check_all
async def test_who_comes_while_a_sidecar_ends_waits_for_the_next_one(outside: str, home: Path) -> None:
    """And is not told that it was replaced. That one ends with its last user, too."""
    async with kept_open():
        async with kept_open("slow", drain=20.0) as first:
            log = Path((await asked(first))["arguments"][2]) / "sidecar.log"
        await until(lambda: "ending" in log.read_text())
        async with kept_open("slow", drain=20.0) as second:
            assert second.sidecar_pid != first.sidecar_pid
            assert not lives(first.sidecar_pid)
            assert (await asked(second))["pid"] == second.sidecar_pid
        await until(lambda: not lives(second.sidecar_pid))


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


@pytest.mark.parametrize("word", ["away", "killed"])
@pytest.mark.check_all
async def test_what_may_pass_while_a_sidecar_starts_is_waited_out(outside: str, home: Path, word: str) -> None:
    async with kept_open(word) as keeping:
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid
    assert "did not start (exit " in (home / "keeper.log").read_text()


async def test_what_does_not_pass_is_said(outside: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PASSES_WITHIN", 0.2)
    lock = state.Lock(home / "keeper.lock")
    assert lock.take()
    assert lock.fd
    over = asyncio.Event()
    wanted = kept.Wanted({}, [sys.executable, "-c", f"raise SystemExit({os.EX_TEMPFAIL})"], {})
    sidecar = kept.KeptSidecar(home, wanted, outside, lock.fd, kept.Children(), lambda _: over.set())
    await asyncio.wait_for(over.wait(), SOON)
    assert sidecar.failed
    assert sidecar.away  # so who waits hears that it is the database, and not he
    assert "exit 75" in (sidecar.trouble or "")
    lock.release()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


async def test_a_sidecar_that_failed_does_not_take_its_successor_along(outside: str, home: Path) -> None:
    async with kept_open():  # the keeper stays
        with pytest.raises(UsageError, match="exit 5"):
            await Keeping.open(Settings(), [*STANDIN, "late"])
        async with kept_open("late") as second:
            await asyncio.sleep(1.5 * keeper.GRACE)  # now the keeper lets go of the one that failed
            async with kept_open("late") as third:
                assert third.sidecar_pid == second.sidecar_pid


@pytest.mark.check_all
async def test_one_that_cannot_come_back_is_tried_again_and_again(outside: str, home: Path) -> None:
    async with kept_open("once") as keeping:
        mark = Path((await asked(keeping))["arguments"][2]) / "was-here"
        os.kill(keeping.sidecar_pid, signal.SIGKILL)
        await until(lambda: "did not start (exit 4)" in (home / "keeper.log").read_text())
        await until(lambda: "exit 4" in (keeping.trouble or ""))
        mark.unlink()
        await changed(keeping)
        assert keeping.trouble is None


@pytest.mark.check_all
async def test_a_user_of_a_killed_keeper_is_patient_with_its_successor(outside: str, home: Path) -> None:
    async with kept_open("once") as keeping:
        known = keeping.sidecar
        mark = Path((await asked(keeping))["arguments"][2]) / "was-here"
        os.kill(keeping.keeper_pid, signal.SIGKILL)
        await until(lambda: "did not start (exit 4)" in (keeping.trouble or ""))
        mark.unlink()
        await changed(keeping)
        assert keeping.sidecar != known


@pytest.mark.check_all
async def test_a_keeper_killed_while_it_starts_is_started_again(
    outside: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, python = home / "was-here", home / "python"
    python.write_text(f'#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    async with kept_open() as keeping:
        assert mark.exists()
        assert (await asked(keeping))["pid"] == keeping.sidecar_pid


@pytest.mark.check_all
async def test_a_client_can_go_while_all_starts(outside: str, home: Path) -> None:
    opening = asyncio.create_task(Keeping.open(Settings(), [*STANDIN, "mute"]))
    await until(lambda: any("standin" in command(pid) for pid in below(home)))
    opening.cancel()
    await asyncio.wait({opening})
    await everything_ended(home)


@pytest.mark.check_all
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
