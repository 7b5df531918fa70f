"""The grocery agent SIGKILLed at each of its steps, with and without its sidecar: ``bench.crashes``, cell by cell.

A mode's keeper and sidecar serve all its cells that one worker plays; each cell has a run and a sandbox.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.crashes import CELLS, UNDISTURBED, Cell, Crashes, Mode, Moment, Seen, Trouble, expected, faults, table
from sandbox.screen import Screen
from sandbox.stage import Stage
from tests.conftest import fresh_database

Crashing = Callable[[Mode], Crashes]


@pytest.fixture(scope="module")
def crashing(server: str, template: str) -> Iterator[Crashing]:
    databases = []
    made: dict[Mode, Crashes] = {}
    with Stage() as stage:

        def crashes(mode: Mode) -> Crashes:
            if mode not in made:
                databases.append(fresh_database(server, template))
                made[mode] = Crashes(stage, mode, DATABASE_URL=next(databases[-1]))
                made[mode].ready()
            return made[mode]

        yield crashes
    for database in databases:
        next(database, None)


def marked(cell: Cell) -> object:
    return pytest.param(cell, id=str(cell), marks=() if cell.mode is Mode.DURABLE else pytest.mark.check_all)


@pytest.mark.parametrize("cell", [marked(cell) for cell in CELLS])
def test_what_a_crash_costs(crashing: Crashing, cell: Cell) -> None:
    seen = crashing(cell.mode).play(cell.moment, cell.step)
    assert not faults(cell, seen), "\n".join(seen.said)


# ---- what is expected, and that a cell which differs is seen


def test_what_is_promised() -> None:
    for cell in CELLS:
        right = expected(cell)
        alone = cell.moment is not Moment.BOTH
        if cell.mode is Mode.DURABLE:
            assert (right.counts["orders"], right.counts["email"]) == (1, 1)
            assert right.counts["llm"] - 3 <= (0 if alone else 1)
        if cell.mode is Mode.JOURNAL and alone:
            assert right.counts == UNDISTURBED
    assert expected(Cell(Mode.JOURNAL, Moment.BOTH, 4)).counts == {"llm": 3, "orders": 2, "email": 1}
    assert expected(Cell(Mode.NAIVE, Moment.AFTER, 6)).counts == {"llm": 6, "orders": 2, "email": 2}


class Played(Crashes):
    """Plays nothing: each cell is seen as *seen*."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def play(self, moment: Moment, step: int, run: str = "") -> Seen:
        if step == 1:
            raise Trouble("it did not happen")
        return self.seen


def test_a_cell_that_differs_is_marked() -> None:
    cells = {Cell(Mode.DURABLE, Moment.INSIDE, step) for step in (1, 2, 4)}
    right = Seen(dict(UNDISTURBED), (0,), 1, frozenset({"key"}))
    out = io.StringIO()
    assert not table(Screen(out), {Mode.DURABLE: Played(right)}, cells)
    said = out.getvalue()
    assert said.count("3/1/1 (3/1/1) ✓") == 2
    assert "1 pantry  ?/?/? (3/1/1) ✗" in said
    assert "durable-inside-1: it did not happen" in said
    assert table(Screen(out), {Mode.DURABLE: Played(right)}, cells - {Cell(Mode.DURABLE, Moment.INSIDE, 1)})
    for wrong in (
        replace(right, counts=UNDISTURBED | {"email": 2}),
        replace(right, codes=(3, 0)),
        replace(right, asked=2),
        replace(right, keys=frozenset({"key", "other"})),
        replace(right, keys=frozenset({None})),
    ):
        assert len(faults(Cell(Mode.DURABLE, Moment.INSIDE, 4), wrong)) == 1
