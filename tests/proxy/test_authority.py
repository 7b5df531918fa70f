"""The CA and its leaves: made once, whole or not at all, its key nobody else's to read."""

import asyncio
import os
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from proxy import authority
from proxy.authority import BUNDLE, CERTIFICATE, Authority, certificate, ensure, rotate
from runtime.errors import TwiceshyError
from tests.stack import PROJECT


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    ensure(folder)
    return folder


MAKE = """
import os, sys
from pathlib import Path
os.umask(0)
from proxy.authority import certificate
print("ready", flush=True)
sys.stdin.readline()
print(certificate(Path(sys.argv[1]))[1])
"""


def test_eight_that_come_at_once_make_one(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        for _ in range(8)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        said = {process.communicate("go\n", timeout=60)[0].strip() for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert said == {certificate(tmp_path)[1]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca", "ca.lock"]
    # Under the widest umask there is.
    assert mode(tmp_path / "ca") == 0o711
    modes = {path.name: mode(path) for path in (tmp_path / "ca").iterdir()}
    assert modes.pop(CERTIFICATE) == modes.pop(BUNDLE) == 0o644
    assert modes.pop("twiceshy-ca.pem") == 0o600
    assert all(each == 0o600 for each in modes.values()), modes
    secret = [path for path in (tmp_path / "ca").iterdir() if b"PRIVATE" in path.read_bytes()]
    assert [path.name for path in secret] == ["twiceshy-ca.pem"]


def test_the_key_is_never_anybody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mitmproxy.certs import CertStore

    create = CertStore.create_store
    seen: list[tuple[int, int]] = []

    def watched(path: Path, *arguments: object, **named: object) -> None:
        old = os.umask(0)
        os.umask(old)
        seen.append((mode(path), old))
        create(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(CertStore, "create_store", watched)
    before = os.umask(0)
    try:
        ensure(tmp_path)
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert seen == [(0o700, 0o077)]


def test_one_that_was_killed_half_way_leaves_nothing(tmp_path: Path) -> None:
    half = tmp_path / "ca-half"
    half.mkdir()
    (half / "twiceshy-ca.pem").write_text("a key")
    ensure(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca", "ca.lock"]


def test_the_bundle_is_the_users_roots_and_ours(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = made / "ca" / CERTIFICATE
    roots = tmp_path / "corporate.pem"
    roots.write_bytes(own.read_bytes())  # some certificate
    os.utime(roots, (1, 1))
    monkeypatch.setenv("SSL_CERT_FILE", str(roots))
    place = ensure(tmp_path)
    text = (place / BUNDLE).read_text()
    assert text.count("BEGIN CERTIFICATE") == 2
    assert text.endswith((place / CERTIFICATE).read_text())
    context = ssl.create_default_context(cafile=str(place / BUNDLE))
    assert len(context.get_ca_certs()) == 2
    # New roots of the system come in; a bundle of our own, which an agent's child inherits, does not.
    before = (place / BUNDLE).stat().st_mtime_ns
    ensure(tmp_path)
    assert (place / BUNDLE).stat().st_mtime_ns == before
    roots.write_text(roots.read_text() * 2)
    os.utime(roots, (2**31, 2**31))
    ensure(tmp_path)
    assert (place / BUNDLE).read_text().count("BEGIN CERTIFICATE") == 3
    monkeypatch.setenv("SSL_CERT_FILE", str(place / BUNDLE))
    (place / BUNDLE).unlink()
    ensure(tmp_path)
    assert (place / BUNDLE).read_text().count((place / CERTIFICATE).read_text()) == 1


async def test_a_leaf_is_made_once_and_not_on_the_loop(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    load = authority._load

    def watched(context: ssl.SSLContext, pem: bytes) -> None:
        threads.append(threading.get_ident())
        load(context, pem)

    monkeypatch.setattr(authority, "_load", watched)
    leaves = Authority(made)
    found = await asyncio.gather(*(leaves.context("api.openai.com") for _ in range(20)))
    assert len({id(each) for each in found}) == 1
    assert await leaves.context("api.openai.com", "api.openai.com") is found[0]
    assert await leaves.context("api.openai.com", "other.test") is not found[0]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_no_more_than_so_many_are_kept(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "LEAVES", 2)
    leaves = Authority(made)
    a, b = await leaves.context("a.test"), await leaves.context("b.test")
    assert await leaves.context("a.test") is a
    await leaves.context("c.test")
    assert await leaves.context("a.test") is a
    assert await leaves.context("b.test") is not b


def names(context: ssl.SSLContext, trusted: Path, name: str) -> list[tuple[str, str]]:
    """What *context* presents to a client that trusts *trusted* and asks for *name*."""
    client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(trusted)).wrap_bio(client_in, client_out, server_hostname=name)
    server = context.wrap_bio(client_out, client_in, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    found = client.getpeercert()
    assert found is not None
    return list(found["subjectAltName"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "name", "expected"),
    [
        ("api.openai.com", "", [("DNS", "api.openai.com")]),
        ("127.0.0.1", "", [("IP Address", "127.0.0.1")]),
        ("::1", "", [("IP Address", "0:0:0:0:0:0:0:1")]),
        ("10.0.0.1", "api.test", [("IP Address", "10.0.0.1"), ("DNS", "api.test")]),
        ("münchen.test", "", [("DNS", "xn--mnchen-3ya.test")]),
        ("a" * 60 + ".example.org", "", [("DNS", "a" * 60 + ".example.org")]),
        ("under_score.test", "", [("DNS", "under_score.test")]),
        ("x" * 100 + ".test", "real.test", None),
    ],
)
async def test_what_a_leaf_says(made: Path, host: str, name: str, expected: list[tuple[str, str]] | None) -> None:
    context = await Authority(made).context(host, name)
    asked = name or (host if host.isascii() else host.encode("idna").decode())
    found = names(context, made / "ca" / CERTIFICATE, asked)
    assert found == expected if expected is not None else ("DNS", name) in found


async def test_what_cannot_stand_in_a_leaf(made: Path) -> None:
    with pytest.raises(TwiceshyError, match="cannot stand in a certificate"):
        await Authority(made).context("\u2028" * 70)


async def test_a_new_ca_is_used_at_once(tmp_path: Path) -> None:
    leaves = Authority(tmp_path)
    old = await leaves.context("a.test")
    before = certificate(tmp_path)
    rotate(tmp_path)
    after = certificate(tmp_path)
    assert before[0] == after[0] and before[1] != after[1]
    new = await leaves.context("a.test")
    assert new is not old
    assert names(new, tmp_path / "ca" / CERTIFICATE, "a.test")
    with pytest.raises(ssl.SSLCertVerificationError):
        names(old, tmp_path / "ca" / CERTIFICATE, "a.test")
    assert (tmp_path / "ca" / BUNDLE).read_text().endswith((tmp_path / "ca" / CERTIFICATE).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca", "ca.lock"]
