"""``twiceshy ca`` and what ``twiceshy env`` gives a shell for TLS."""

import os
import re
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.folder import Lock
from tests.kill.launchers import until
from tests.kill.processes import below
from tests.kill.test_terminal import Shell
from tests.stack import PROJECT

FINGERPRINT = re.compile(r"SHA-256 ((?:[0-9A-F]{2}:){31}[0-9A-F]{2})\Z")


def twiceshy(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", *words], capture_output=True, text=True, timeout=60,
        env={**os.environ, "TWICESHY_HOME": str(home), "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip


def shown(home: Path, *words: str) -> tuple[Path, str]:
    done = twiceshy(home, "ca", *words)
    assert done.returncode == 0, done.stderr
    path, line = done.stdout.splitlines()
    found = FINGERPRINT.match(line)
    assert found is not None, line
    return Path(path), found[1]


def test_it_shows_file_and_fingerprint(tmp_path: Path) -> None:
    path, fingerprint = shown(tmp_path / "new" / "home")
    assert path == tmp_path / "new" / "home" / "ca" / "ca.pem"
    assert shown(tmp_path / "new" / "home") == (path, fingerprint)
    assert ssl.create_default_context(cafile=str(path)).get_ca_certs()[0]["issuer"] is not None


def test_the_certificate_alone_is_exported(tmp_path: Path) -> None:
    path, fingerprint = shown(tmp_path)
    assert shown(tmp_path, "--export", str(tmp_path / "out.pem")) == (tmp_path / "out.pem", fingerprint)
    assert (tmp_path / "out.pem").read_text() == path.read_text()
    assert "PRIVATE" not in path.read_text()
    assert stat.S_IMODE((tmp_path / "out.pem").stat().st_mode) & 0o400
    assert twiceshy(tmp_path, "ca", "--export", "-").stdout == path.read_text()
    failed = twiceshy(tmp_path, "ca", "--export", str(tmp_path / "no" / "where"))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1


def test_it_is_rotated_when_nobody_is_served(tmp_path: Path) -> None:
    path, old = shown(tmp_path)
    lock = Lock(tmp_path / "keeper.lock")
    assert lock.take()
    refused = twiceshy(tmp_path, "ca", "--rotate")
    assert refused.returncode == 2
    assert f"is running (pid {os.getpid()})" in refused.stderr
    assert shown(tmp_path) == (path, old)
    lock.release()
    assert shown(tmp_path, "--rotate")[1] != old
    assert shown(tmp_path)[1] != old


@pytest.fixture
def shell(home: Path, outside: str, tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "twiceshy").write_text(f'#!/bin/sh\nexec {sys.executable} -m proxy.cli "$@"\n')
    (tmp_path / "twiceshy").chmod(0o755)
    opened = Shell(
        tmp_path,
        {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(PROJECT),
            "TWICESHY_HOME": str(home), "DATABASE_URL": outside, "SSL_CERT_DIR": "/etc/ssl/certs",
            "NO_PROXY": "localhost",
        },
    )  # fmt: skip
    yield opened
    opened.close()
    until(lambda: not below(home), "keeper and sidecar end with the last shell")


def test_env_gives_a_shell_all_that_an_agent_gets(shell: Shell, home: Path) -> None:
    shell.type('eval "$(twiceshy env --run r1)"\n')
    shell.expect("twiceshy: run r1, proxy 127.0.0.1:", 60)
    shell.expect("<prompt>")
    names = "$SSL_CERT_FILE $CURL_CA_BUNDLE $NODE_EXTRA_CA_CERTS ${SSL_CERT_DIR-unset} ${NO_PROXY:-empty}"
    shell.type(f'echo "<{names}>"\n')
    shell.expect("\n<")
    bundle = f"{home}/ca/bundle.pem"
    assert shell.expect(">").removesuffix(">").split() == [bundle, bundle, f"{home}/ca/ca.pem", "unset", "empty"]
    shell.expect("<prompt>")
    shell.type('echo "<$PYTHONPATH $NODE_OPTIONS>"\n')
    shell.expect("\n<")
    site, options = shell.expect(">").removesuffix(">").split(" ", 1)
    assert site.split(":") == [options.removeprefix('--require "').removesuffix('/preload.cjs"'), str(PROJECT)]
    shell.expect("<prompt>")
