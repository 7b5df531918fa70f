from collections.abc import Iterator

import pytest

from sandbox.client import Sandbox
from tests.conftest import _still_keeping, fresh_database, scratch
from tests.kill.launchers import World
from tests.sdk.place import Place


@pytest.fixture(scope="module")
def place(server: str, template: str) -> Iterator[Place]:
    """One keeper and one sidecar for a module, whatever runs on them."""
    databases = fresh_database(server, template)
    dsn = next(databases)
    with scratch("ts-") as home, Sandbox.start(home / "sandbox.log", tls=home / "tls") as sandbox:
        world = World(dsn, home / "state", sandbox)
        made = Place(world, home / "tls")
        try:
            yield made
        finally:
            made.close()
            world.close()
            left = _still_keeping(home, patience=20.0)
    next(databases, None)
    assert not left
