"""Under whose fence an exchange begins, when its run was taken over before it could."""

import asyncio
from types import SimpleNamespace
from typing import Any

from proxy.message import Request
from proxy.profiles import Rules
from proxy.recorder import Ending, Exchange, Shell
from proxy.refusals import Refusal
from proxy.tape import Step, Tape
from runtime.entries import Entry, Fence, Fenced, Intent, Outcome, StepFacts
from runtime.settings import Settings
from runtime.step import Effect


class Journal:
    """Fences whatever is not of the second attempt, once it may."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.open = asyncio.Event()

    async def write(self, entry: Entry) -> Outcome:
        await self.open.wait()
        self.entries.append(entry)
        return Fenced()


def owner(n: int) -> Any:
    refused: list[Refusal] = []
    return SimpleNamespace(
        run_id="r", fence=Fence("r", bytes([n]) * 32, "s"), tape=Tape(attempt=n), refusal=None, outdated=False,
        refuse=refused.append, refused=refused, settled=lambda *_: None,
        outcome_refusal=lambda _: Refusal("fenced", "taken over", "r"),
    )  # fmt: skip


async def test_an_attempt_taken_over_begins_nothing_in_its_successors_name() -> None:
    request = Request("POST", "http", "127.0.0.1", 1, "/email/send", (), b"{}")
    rule = Rules.load([]).match(request)
    assert rule.effect is Effect.AT_MOST_ONCE
    facts = StepFacts("k", rule.effect, False, bytes(32), 1, bytes(16), "POST", request.url, None, b"{}", b"{}", b"")
    journal, first, second = Journal(), owner(1), owner(2)

    async def first_bytes() -> Request:
        await journal.open.wait()
        return request

    async def revive() -> None:
        pass

    pulse: Any = SimpleNamespace(alive=lambda: True, revive=revive)
    nobody: Any = SimpleNamespace()
    shell: Any = Shell(journal, nobody, Settings(), pulse, nobody)  # type: ignore[arg-type]
    exchange = Exchange(shell, first, "r", request, rule, Step(facts), recall=first_bytes)
    exchange.start()
    await asyncio.sleep(0)
    exchange.owned_by(second)
    journal.open.set()
    await exchange.over()

    (entry,) = journal.entries
    assert isinstance(entry, Intent)
    assert entry.fence == first.fence
    assert exchange.ending is Ending.REFUSED
    assert second.refused == [], "the successor is not fenced by what its predecessor wrote too late"
