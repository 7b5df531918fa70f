"""One sidecar for all; a run of its own for each test, whose environment is that of an agent."""

from collections.abc import Callable, Iterator

import pytest

from runtime.launch.environment import environment
from tests.conftest import fresh_database
from tests.stack import Attempt, Stack, stack


@pytest.fixture(scope="package")
def one_stack(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    databases = fresh_database(server, template)
    with stack(next(databases), tmp_path_factory.mktemp("stack")) as made:
        yield made
    next(databases, None)


@pytest.fixture
def begin(one_stack: Stack, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Attempt]]:
    """Begin an attempt of the test's run, as a launcher does: from then on this process speaks for it."""

    def begin() -> Attempt:
        attempt = one_stack.claim(run)
        assert attempt.token is not None
        address = f"127.0.0.1:{attempt.port}"
        for name, value in environment({}, run=run, token=attempt.token, proxy=address).items():
            monkeypatch.setenv(name, value)
        return attempt

    one_stack.mark()
    yield begin
    one_stack.sandbox.clear()
