"""Shared by the tests that kill: state folders on the session's server, and a world of launchers or workers on one.

A world serves a whole module: agents change nothing of which sidecar is shared. A module that wants another one says
so: ``WORLD = {"tls": True, "hold": "0.2"}`` (the sandbox over TLS; settings).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.client import Sandbox
from tests.conftest import _still_keeping, fresh_database, scratch
from tests.kill.launchers import Bench, World, until
from tests.kill.works import Works


@pytest.fixture
def outside(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A state folder that uses the session's server: no initdb."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    return dsn


@pytest.fixture(scope="module")
def one_world(server: str, template: str, request: pytest.FixtureRequest) -> Iterator[World]:
    settings = dict(getattr(request.module, "WORLD", {}))
    tls = settings.pop("tls", False)
    databases = fresh_database(server, template)
    dsn = next(databases)
    with (
        scratch("ts-") as home,
        Sandbox.start(home / "sandbox.log", tls=home / "tls" if tls else None) as sandbox,
    ):
        world = World(dsn, home / "state", sandbox, **settings)
        try:
            yield world
        finally:
            world.close()
            left = _still_keeping(home, patience=20.0)
    next(databases, None)
    assert not left


@pytest.fixture
def bench(one_world: World, tmp_path: Path, run: str) -> Iterator[Bench]:
    made = Bench(one_world, tmp_path, run)
    yield made
    _end(made)


@pytest.fixture
def works(one_world: World, tmp_path: Path, run: str) -> Iterator[Works]:
    made = Works(one_world, tmp_path, run)
    yield made
    _end(made)
    until(lambda: not made.forked(), "no agent is left")
    # Nothing of this test is for the workers of the next one.
    one_world.fetch("UPDATE twiceshy.run SET status = 'cancelled', token_hash = NULL, stop_message = NULL")


def _end(bench: Bench) -> None:
    for process in bench.started:
        process.kill()
        process.communicate()
    bench.sandbox.clear()
    until(lambda: not bench.agents(), "no agent is left")
