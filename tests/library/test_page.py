"""The programs of docs/library.md, run."""

from collections.abc import Callable
from typing import Any

from tests.docs.test_library import programs
from tests.stack import Attempt, Stack


def test_the_first_program_and_the_activity_run(begin: Callable[..., Attempt], run: str, one_stack: Stack) -> None:
    for _ in range(2):
        begin()
        spoken: dict[str, Any] = {}
        for program in programs()[:2]:
            exec(program, spoken)
        assert (spoken["weight"], spoken["small"]) == ({"grams": 500}, "cat-100")
    result = one_stack.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"]
    assert result == b'{"grams": 500, "paid": false}'
