"""A journal on a fresh database, and one run on it."""

from collections.abc import AsyncIterator

import pytest

from runtime.journal import Journal
from tests.database.samples import Scene, claim, opened, register


@pytest.fixture
async def journal(dsn: str) -> AsyncIterator[Journal]:
    async with opened(dsn) as journal:
        await register(journal)
        yield journal


@pytest.fixture
async def scene(journal: Journal) -> Scene:
    return await claim(journal)
