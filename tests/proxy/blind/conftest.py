"""A stack whose rules leave some hosts unopened, and deny some, for the tests of this folder.

``localhost`` and ``127.0.0.2`` are not opened, ``127.0.0.1`` is. The client trusts the upstream's CA and not the
sidecar's, and the sidecar trusts neither: what a client sees of the upstream's certificate it sees unopened.
"""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.tls import Issuer
from tests.conftest import fresh_database
from tests.raw import Origin
from tests.stack import Stack, stack
from tests.tunnelled import TlsOrigin, context_of

ROUTES = """
[[route]]
host = "127.0.0.3"
effect = "deny"
name = "nobody goes there"

[[route]]
host = "127.0.0.1"
path = "/admin/**"
methods = ["DELETE"]
effect = "deny"
name = "no deletes"

[[route]]
name = "blind hosts"
host = ["localhost", "127.0.0.2", "169.254.*", "0.0.0.0"]
effect = "tunnel"
"""
#: So often the sidecar confirms leases: a third of it.
LEASE = 3


@pytest.fixture(scope="package")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routes") / "twiceshy.toml"
    path.write_text(ROUTES)
    return path


@pytest.fixture(scope="package")
def blind_stack(server: str, template: str, tmp_path_factory: pytest.TempPathFactory, routes: Path) -> Iterator[Stack]:
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("blind"), config=routes, lease=LEASE) as made:
            yield made


@pytest.fixture(scope="package")
def brief(server: str, template: str, tmp_path_factory: pytest.TempPathFactory, routes: Path) -> Iterator[Stack]:
    """A stack that soon ends a tunnel in which nothing moves, and lets pass who names no run."""
    for dsn in fresh_database(server, template):
        folder = tmp_path_factory.mktemp("brief")
        with stack(dsn, folder, config=routes, tunnel_timeout=0.5, unidentified="pass") as made:
            yield made


@pytest.fixture
def shared(blind_stack: Stack) -> Iterator[Stack]:
    blind_stack.mark()
    yield blind_stack
    blind_stack.sandbox.clear()
    if blind_stack.sidecar.process.poll() is not None:
        blind_stack.restart()


@pytest.fixture(scope="package")
def issuer() -> Issuer:
    """A CA that the client trusts."""
    return Issuer("somebody's CA")


@pytest.fixture
def origin(issuer: Issuer, tmp_path: Path) -> Iterator[TlsOrigin]:
    context = context_of(issuer.issue(["localhost", "127.0.0.2"]), tmp_path)
    context.set_alpn_protocols(["h2"])
    with TlsOrigin(context) as made:
        yield made


@pytest.fixture
def plain() -> Iterator[Origin]:
    with Origin() as made:
        yield made


@pytest.fixture
def trust(issuer: Issuer, tmp_path: Path) -> ssl.SSLContext:
    path = tmp_path / "ca.pem"
    path.write_bytes(issuer.pem)
    context = ssl.create_default_context(cafile=str(path))
    context.set_alpn_protocols(["h2"])
    return context
