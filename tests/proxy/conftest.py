"""One sidecar and one sandbox per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, stack


@pytest.fixture
def heart(dsn: str, tmp_path: Path) -> Iterator[Stack]:
    """The stack with default settings but short pauses."""
    with stack(dsn, tmp_path) as made:
        yield made
