"""Shared by the tests that kill: a state folder on the session's server."""

from pathlib import Path

import pytest


@pytest.fixture
def outside(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A state folder that uses the session's server: no initdb."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    return dsn
