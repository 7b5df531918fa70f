from collections.abc import Iterator

import pytest

from tests.raw import Origin


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()
