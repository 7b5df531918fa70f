"""Sidecars, agents, Postgres and an upstream, all real, in every order that Hypothesis finds."""

from collections.abc import Iterator

import pytest

from tests.conftest import fresh_database
from tests.model.machine import explore
from tests.model.world import World


@pytest.fixture(scope="module")
def world(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    for dsn in fresh_database(server, template):
        with World(dsn, tmp_path_factory.mktemp("model")) as made:
            yield made


def test_a_few_short_ones(world: World) -> None:
    explore(world, 5, 10)


@pytest.mark.check_all
def test_many_long_ones(world: World) -> None:
    explore(world, 200, 30)
