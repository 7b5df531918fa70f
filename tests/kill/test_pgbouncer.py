"""Through a real PgBouncer in transaction mode: a run, killed and gone on with, and what the pooler itself survives."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from runtime.database import migrate
from runtime.embedded import Postgres
from tests.apart import apart
from tests.api.processes import started
from tests.conftest import NOBODY, scratch
from tests.kill.launchers import until
from tests.stack import Stack, stack
from twiceshy import ChildFailed, Client

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}


class Bouncer:
    """PgBouncer in transaction mode with few connections, before a server."""

    def __init__(self, program: str, dsn: str, folder: Path) -> None:
        parts = urlsplit(dsn)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._program = program
        self._folder = folder
        folder.chmod(0o777)
        (folder / "users.txt").write_text(f'"{parts.username}" "{parts.password}"\n')
        self._file = folder / "pgbouncer.ini"
        self._file.write_text(
            f"[databases]\n* = host={parts.hostname} port={parts.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nauth_type = scram-sha-256\nauth_file = {folder}/users.txt\nunix_socket_dir =\n"
            f"pool_mode = transaction\ndefault_pool_size = 3\nserver_lifetime = 1\nlogfile = {folder}/pgbouncer.log\n"
        )
        self.dsn = urlunsplit(
            parts._replace(
                netloc=f"{parts.username}:{parts.password}@127.0.0.1:{self.port}", query="statement_cache_size=0"
            )
        )
        self.start()

    def start(self) -> None:
        # It refuses to run as root.
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._process = subprocess.Popen(
            [self._program, "-q", str(self._file)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user
        )  # type: ignore[call-overload]
        until(self._listens, "PgBouncer listens")

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def bouncer() -> Iterator[Bouncer]:
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed here: transaction mode is tried without it (test_group_commit)")
    with scratch("twiceshy-bouncer-") as folder:
        postgres = Postgres(folder, {"fsync": "off"})
        try:
            apart(migrate(postgres.start()))
            (folder / "bouncer").mkdir()
            made = Bouncer(program, postgres.dsn, folder / "bouncer")
            try:
                yield made
            finally:
                made.stop()
        finally:
            postgres.stop()


@pytest.fixture
def behind(bouncer: Bouncer, tmp_path: Path) -> Iterator[Stack]:
    with stack(bouncer.dsn, tmp_path, poll=0.1) as made:
        yield made


def test_migrations_go_through_it(bouncer: Bouncer) -> None:
    apart(migrate(bouncer.dsn))


def test_a_run_that_is_killed_goes_on(behind: Stack, run: str) -> None:
    first = behind.claim(run)
    assert first.ask("POST", behind.url("/orders"), ORDER).status == 201
    behind.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    first.send("POST", behind.url("/email/send"), MAIL)
    behind.sandbox.wait_held("slow")
    first.die()
    second = behind.claim(run)
    assert second.ask("POST", behind.url("/orders"), ORDER).replayed
    joined = second.in_background("POST", behind.url("/email/send"), MAIL)
    behind.sandbox.release("slow")
    assert joined.result().status == 202
    behind.restart()
    third = behind.claim(run)
    assert third.ask("POST", behind.url("/email/send"), MAIL).replayed
    assert behind.end(third, "done", 0) == "done"
    assert {service: len(behind.effects(service)) for service in ("orders", "email")} == {"orders": 1, "email": 1}


def test_a_pooler_that_is_killed_is_an_outage(behind: Stack, bouncer: Bouncer, run: str) -> None:
    attempt = behind.claim(run)
    behind.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    mail = attempt.in_background("POST", behind.url("/email/send"), MAIL)
    behind.sandbox.wait_held("slow")
    bouncer.stop()
    behind.sandbox.release("slow")
    order = attempt.in_background("POST", behind.url("/orders"), ORDER)
    bouncer.start()
    assert (mail.result().status, order.result().status) == (202, 201)
    assert behind.end(attempt, "done", 0) == "done"
    assert [len(behind.effects(service)) for service in ("orders", "email")] == [1, 1]


def test_the_api_behind_it(bouncer: Bouncer, tmp_path: Path) -> None:
    with started(bouncer.dsn, tmp_path) as api:
        client = Client(api.url, api.key)
        runs = [client.start("a", n, key=f"of-{n}") for n in range(8)]
        client.signal(runs[0], "go", id="e1")
        client.cancel(runs[0])
        with pytest.raises(ChildFailed, match="cancelled"):
            client.result(runs[0], timeout=30)
