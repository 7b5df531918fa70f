"""A stack whose sandbox speaks TLS, for the tests of this folder."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.tls import Issuer
from tests.conftest import fresh_database
from tests.stack import Stack, stack
from tests.tunnelled import (
    Secure,
    TlsOrigin,
    context_of,
    trusting,
)  # fmt: skip


@pytest.fixture(scope="package")
def issuer() -> Issuer:
    return Issuer("an upstream's CA")


@pytest.fixture(scope="package")
def secure_stack(
    server: str, template: str, tmp_path_factory: pytest.TempPathFactory, issuer: Issuer
) -> Iterator[Stack]:
    """The stack with a sandbox over TLS. The sidecar trusts its CA, and that of the tests' own upstreams."""
    folder = tmp_path_factory.mktemp("tls")
    from sandbox import tls

    both = folder / "both.pem"
    both.write_bytes((tls.ensure(folder / "tls") / tls.CA).read_bytes() + issuer.pem)
    for dsn in fresh_database(server, template):
        with stack(dsn, folder, tls=True, extra_ca=both) as made:
            yield made


@pytest.fixture
def shared(secure_stack: Stack) -> Iterator[Stack]:
    secure_stack.mark()
    yield secure_stack
    secure_stack.sandbox.clear()


@pytest.fixture
def trust(shared: Stack) -> ssl.SSLContext:
    return trusting(shared)


@pytest.fixture
def agent(shared: Stack, run: str, trust: ssl.SSLContext) -> Secure:
    return Secure.of(shared.claim(run), shared, trust)


@pytest.fixture
def origin(issuer: Issuer, tmp_path: Path) -> Iterator[TlsOrigin]:
    with TlsOrigin(context_of(issuer.issue(["127.0.0.1", "localhost"]), tmp_path)) as made:
        yield made
