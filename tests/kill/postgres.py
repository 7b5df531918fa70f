"""A Postgres of a test's own, to be stopped or killed."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.database import migrate
from runtime.embedded import Postgres
from tests.apart import apart
from tests.conftest import scratch


@contextmanager
def own_postgres() -> Iterator[Postgres]:
    """A migrated server. What is committed is with the kernel: no SIGKILL of the server takes that."""
    with scratch("twiceshy-postgres-") as folder:
        made = Postgres(folder, {"fsync": "off", "full_page_writes": "off"})
        try:
            apart(migrate(made.start()))
            yield made
        finally:
            made.stop()
