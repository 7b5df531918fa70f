"""One sidecar and one sandbox per test, or, where tests leave both as they were, per module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import fresh_database
from tests.raw import Origin
from tests.stack import Stack, stack


@pytest.fixture
def origin() -> Iterator[Origin]:
    """An upstream that says what a test has it say, byte for byte."""
    with Origin() as made:
        yield made


@pytest.fixture
def heart(dsn: str, tmp_path: Path) -> Iterator[Stack]:
    """The stack with default settings."""
    with stack(dsn, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def module_dsn(server: str, template: str) -> Iterator[str]:
    """A fresh, migrated database for a module."""
    yield from fresh_database(server, template)


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack with default settings."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack")) as made:
        yield made


@pytest.fixture
def shared(module_stack: Stack) -> Iterator[Stack]:
    """The module's stack. Name runs as no other test of the module does; ``received`` counts this test's requests."""
    module_stack.mark()
    yield module_stack
    module_stack.sandbox.clear()
    if module_stack.sidecar.process.poll() is not None:
        module_stack.restart()
