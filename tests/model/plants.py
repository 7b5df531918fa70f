"""Bugs that are planted, so that it is seen that the model finds them: in a sidecar, or in the database."""

from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from proxy.lines import Line
from proxy.recorder import Exchange
from runtime.entries import Bound, Intent


@dataclass(frozen=True)
class Plant:
    """One bug. *function* of the database has *right* once, which becomes *wrong*."""

    in_sidecar: Callable[[], None] = lambda: None
    function: str = ""
    right: str = ""
    wrong: str = ""

    async def in_database(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        if self.function:
            text = await connection.fetchval("SELECT pg_get_functiondef($1::regproc)", f"twiceshy.{self.function}")
            assert text.count(self.right) == 1, f"{self.function} has changed: the bug must be planted otherwise"
            await connection.execute(text.replace(self.right, self.wrong))


def _check_the_fence_first() -> None:
    """Whether the fence holds is asked before the intent is written, and not again when it is."""
    intend = Exchange._intend

    async def planted(self: Exchange) -> bool:
        assert self.step is not None and self._asked_under is not None
        found = await self._shell.journal.renew([self._asked_under], extend=False)
        outcome = found[self.run_id]
        if not isinstance(outcome, Bound):
            facts = self.step.facts
            self._refused_by(outcome, Intent(self._asked_under, facts, self.id, self.place, self._replaces))
            return False
        return await intend(self)

    Exchange._intend = planted  # type: ignore[method-assign]


def _believe_what_is_written() -> None:
    """An answer counts as delivered when it was written."""

    async def acknowledged(self: Line, *, strictly: bool = False) -> bool:
        return not self.gone

    Line.acknowledged = acknowledged  # type: ignore[method-assign]


PLANTS = {
    "the fence outside the transaction": Plant(
        _check_the_fence_first,
        "write",
        "outcome := CASE\n",
        "outcome := CASE WHEN e.kind = 'intent' THEN 'holds'\n",
    ),
    "take-over without exchange id": Plant(
        function="write_intent",
        right="IF old.state = 'sent' AND old.exchange = e.replaces AND (",
        wrong="IF true OR (",
    ),
    "delivered on write": Plant(_believe_what_is_written),
}
