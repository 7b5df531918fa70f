"""The state folder: where it is, and its locks, sockets, ports and logs."""

import errno
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from runtime import folder as state
from runtime.errors import UsageError
from runtime.keeping import environment, settings_as_values
from runtime.settings import Settings, load


def test_settings_arrive_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        poll=0.5, extra_ca="mine.pem", route=[{"host": "a", "ignore": ["$.b"], "key": {"in": "header"}}]
    )
    (tmp_path / "settings.json").write_text(json.dumps(settings_as_values(settings)))
    monkeypatch.setenv("TWICESHY_CONFIG", str(tmp_path / "settings.json"))
    assert load() == settings.model_copy(update={"extra_ca": str(Path.cwd() / "mine.pem")})


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


def test_what_the_background_gets_of_the_environment() -> None:
    known = {"PATH": "p", "LC_ALL": "C", "PGPASSWORD": "s", "TWICESHY_HOME": "h", "TWICESHY_FAILPOINT": "f"}
    kept_back = {"OPENAI_API_KEY": "k", "https_proxy": "x", "TWICESHY_RUN": "r", "TWICESHY_TOKEN": "t"}
    as_values = {"TWICESHY_LEASE": "5", "TWICESHY_CONFIG": "c"}
    assert environment(known | kept_back | as_values) == known


def test_without_a_home_folder_the_words_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="set TWICESHY_HOME"):
        state.state_folder(None)


def test_folders_are_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    # Root's Postgres runs as somebody else, who may pass, and see nothing.
    assert (tmp_path / "a").stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    state.make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="set TWICESHY_HOME"):
            state.make_folder(folder)


def test_a_lock_is_free_only_when_all_who_inherited_it_are_gone(tmp_path: Path) -> None:
    lock = state.Lock(tmp_path / "some.lock")
    assert lock.take()
    assert lock.fd
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    lock.release()
    other = state.Lock(tmp_path / "some.lock")
    assert not other.take()
    assert other.held()
    assert other.owner() == str(os.getpid())
    child.kill()
    child.wait()
    assert not other.held()
    assert other.take()
    other.release()


def test_a_lock_is_taken_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = state.Lock(tmp_path / "some.lock")
    with monkeypatch.context() as now:
        now.setattr(os, "write", full)
        assert lock.take()
    assert state.Lock(tmp_path / "some.lock").held()
    lock.release()
    with pytest.raises(UsageError, match=r"none/some\.lock: No such file"):
        state.Lock(tmp_path / "none" / "some.lock").take()


def test_held_ports_are_given_to_nobody_else(tmp_path: Path) -> None:
    with state.hold_kept_port(tmp_path / "port") as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", port))
        for _ in range(2):
            # As a sidecar does that comes and goes.
            with socket.create_server(("127.0.0.1", port)) as server:
                socket.create_connection(("127.0.0.1", port)).close()
                server.accept()[0].close()
    with state.hold_kept_port(tmp_path / "port") as held:
        assert held.getsockname()[1] == port
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OSError, match="in use"):
            state.hold_port(port)
        with state.hold_kept_port(tmp_path / "port") as held:
            assert held.getsockname()[1] != port
    (tmp_path / "port").write_text("99999999")
    state.hold_kept_port(tmp_path / "port").close()


def test_sockets_of_any_length_take_a_stale_ones_place(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    for path in (tmp_path / "s", deep / "s"):
        assert state.connect(path) is None
        state.listen(path).close()
        assert path.is_socket()
        assert state.connect(path) is None
        with state.listen(path):
            connection = state.connect(path)
            assert connection is not None
            connection.close()
            assert path.stat().st_mode & 0o777 == 0o600


def test_logs_are_bounded_and_their_writers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LOG_LIMIT", 100)
    log = tmp_path / "log"
    fd = state.open_log(log)
    os.write(fd, b"first\n" * 20)
    state.trim_log(log)
    os.write(fd, b"second\n")
    assert log.read_bytes() == b"second\n"
    assert (tmp_path / "log.1").read_bytes() == b"first\n" * 20
    assert state.tail(log) == "second"
    assert state.tail(log, since=7) == ""
    assert state.tail(tmp_path / "none") == ""
    state.trim_log(log)
    assert log.read_bytes() == b"second\n"
    os.close(fd)
