"""Thirty requests at once, twenty of them equal, answered in random order, their agent killed again and again."""

import json
import random
from collections import Counter

import pytest

from tests.stack import Attempt, Background, Stack

EQUAL, DIFFERENT, KILLS = 20, 10, 20


def ask_all(attempt: Attempt, url: str, chance: random.Random) -> tuple[list[Background], list[Background]]:
    """The equal ones and the different ones, begun in random order."""
    wanted = [{"same": True}] * EQUAL + [{"other": n} for n in range(DIFFERENT)]
    order = list(range(len(wanted)))
    chance.shuffle(order)
    begun = {n: attempt.in_background("POST", url, wanted[n]) for n in order}
    return [begun[n] for n in range(EQUAL)], [begun[n] for n in range(EQUAL, EQUAL + DIFFERENT)]


@pytest.mark.parametrize("path", ["/any/many", "/orders"], ids=["at_most_once", "keyed"])
def test_thirty_requests_killed_twenty_times_are_made_once_each(shared: Stack, run: str, path: str) -> None:
    url, chance = shared.url(path), random.Random(7)
    shared.sandbox.fault(match={"path": path}, times=0, delay=[0.0, 1.0])
    own: dict[int, set[bytes]] = {n: set() for n in range(DIFFERENT)}
    for kill in range(KILLS):
        attempt = shared.claim(run)
        equal, different = ask_all(attempt, url, chance)
        asked, enough = [*equal, *different], chance.randrange(EQUAL + DIFFERENT)
        # In the beginning while requests come in, later while answers go out.
        if kill < KILLS // 2:
            shared.sandbox.wait_for(lambda: len(shared.received()) > 3 * kill)  # noqa: B023
        else:
            shared.sandbox.wait_for(lambda: sum(one.reply is not None for one in asked) >= enough)  # noqa: B023
        shared.end(attempt, "died")
        for one in asked:
            one.thread.join(10)
        for n, one in enumerate(different):
            if one.reply is not None:
                own[n].add(one.reply.body)

    ends = []
    for _ in range(2):
        attempt = shared.claim(run)
        equal, different = ask_all(attempt, url, chance)
        ends.append(Counter(one.result().body for one in equal))
        for n, one in enumerate(different):
            own[n].add(one.result().body)
        shared.end(attempt, "died")

    assert len(shared.received(method="POST")) == EQUAL + DIFFERENT
    assert len({received.header("idempotency-key") for received in shared.received()}) == EQUAL + DIFFERENT
    assert len(shared.effects()) == EQUAL + DIFFERENT
    # Every answer of the sandbox differs from all others: each went to one asker, and always to the same.
    sent = {received.n: received for received in shared.received()}
    made = {effect.id: sent[effect.n] for effect in shared.effects()}
    assert all(len(answers) == 1 for answers in own.values())
    for n, answers in own.items():
        assert made[ident(answers.pop())].json() == {"other": n}
    assert ends[0] == ends[1]
    assert {made[ident(body)].json()["same"] for body in ends[0]} == {True}
    assert len(ends[0]) == EQUAL


def ident(body: bytes) -> str:
    """What the sandbox made, as its answer says."""
    answer = json.loads(body)
    return str(answer.get("id") or answer["n"])
