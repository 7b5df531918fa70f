"""The model finds what it is there for: bugs that are planted in a sidecar or in the database."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis.errors import Flaky

from tests.model.machine import explore
from tests.model.plants import PLANTS
from tests.model.world import World

pytestmark = pytest.mark.check_all


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_is_found(dsn: str, tmp_path: Path, plant: str) -> None:
    with World(dsn, tmp_path, plant=plant) as world:
        # Real things do not happen twice in the same way: that it was seen once is what counts.
        with suppress(AssertionError, Flaky):
            explore(world, 200, 30, shrink=False)
        assert world.broken
    print(world.broken)
