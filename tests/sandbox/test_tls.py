"""The sandbox over TLS, with a CA of its own."""

import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sandbox.client import Sandbox
from sandbox.tls import CERTIFICATE, KEY, Issuer, ensure
from tests.stack import PROJECT


def test_it_is_trusted_by_its_ca_only(tmp_path: Path) -> None:
    with Sandbox.start(tmp_path / "log", tls=tmp_path / "tls") as sandbox:
        assert sandbox.url.startswith("https://127.0.0.1:")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(sandbox.ca))),
        )
        for host in ("127.0.0.1", "localhost"):
            with opener.open(f"https://{host}:{sandbox.port}/pantry") as answer:
                assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.build_opener(
                urllib.request.ProxyHandler({}),
                urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=Issuer().pem.decode())),
            ).open(sandbox.url + "/pantry")
        assert sandbox.hits() == {("GET", "/pantry"): 2}


def test_the_certificates_stay(tmp_path: Path) -> None:
    folder = ensure(tmp_path / "tls")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ensure(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_certificate_may_be_brought(tmp_path: Path) -> None:
    folder = ensure(tmp_path / "tls")
    command = [sys.executable, "-m", "sandbox", "--log", str(tmp_path / "log"), "--stdin-lifetime"]
    command += ["--tls-cert", str(folder / CERTIFICATE), "--tls-key", str(folder / KEY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT) as process:
        try:
            assert process.stdout is not None
            assert b"port" in process.stdout.readline()
        finally:
            process.kill()
