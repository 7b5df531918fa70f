"""Whole runs on the pure heart: whatever program, order, faults and kills, nothing is done twice.

The promises are those of DESIGN §3 to §5. A program is walked to its end in a world of memory
(``tests.core.walk``), where the agent, the sidecar, or both die at any point: before the intent, between intent
and first byte, between bytes and record, between record and delivery, in delivery.
"""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.step import Effect, RunStatus
from tests.core.walk import Ask, Kill, Person, Program, Walk
from tests.core.world import Fault

# ---- programs

NAMES = {
    "status": Effect.READ, "page": Effect.READ,
    "plan": Effect.REPEATABLE, "draft": Effect.REPEATABLE,
    "refund": Effect.IDEMPOTENT, "order": Effect.IDEMPOTENT,
    "mail": Effect.AT_MOST_ONCE, "post": Effect.AT_MOST_ONCE,
}  # fmt: skip


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    name = draw(st.sampled_from(sorted(NAMES)))
    effect = NAMES[name]
    signal = draw(st.sampled_from(["none", "token" if effect.is_effect else "count"]))
    return Ask(name, effect, draw(st.booleans()), draw(st.integers(1, 3)), draw(st.booleans()), signal)  # type: ignore[arg-type]


def branches(most: int) -> st.SearchStrategy[tuple[tuple[Ask, ...], ...]]:
    return st.lists(st.lists(asks(), min_size=1, max_size=3).map(tuple), min_size=1, max_size=most).map(tuple)


def programs(side_by_side: int) -> st.SearchStrategy[Program]:
    return st.lists(branches(side_by_side), min_size=1, max_size=3).map(tuple)


orders = st.lists(st.integers(0, 11), max_size=40)
faults = st.lists(st.sampled_from(Fault), max_size=5)
kills = st.lists(st.tuples(st.integers(1, 60), st.sampled_from(Kill)), max_size=4)
people = st.lists(st.sampled_from(Person), max_size=2)


# ---- promises


def logical(program: Program) -> Counter[str]:
    """How many requests of each name the program makes; a named one is one, however often it is asked."""
    count: Counter[str] = Counter()
    named = set()
    for ask in (ask for phase in program for branch in phase for ask in branch):
        if not ask.named:
            count[ask.name] += 1
        else:
            named.add(ask.name)
    return count + Counter(named)


def walked(walk: Walk) -> Walk:
    """Walk, and hold it to every promise."""
    walk.run()
    wanted = logical(walk.program)
    for name, effect in NAMES.items():
        done, calls = walk.upstream.done(name), walk.upstream.calls[name]
        if effect is Effect.IDEMPOTENT:
            assert done <= wanted[name], f"{name} was done {done} times"
        elif effect is Effect.AT_MOST_ONCE:
            assert done <= wanted[name] + walk.bold[name], f"{name} was done {done} times"
        else:
            assert calls <= wanted[name] + walk.excused[name], f"{name} was called {calls} times"
    for place, answers in walk.final.items():
        name = place.split()[-1]
        if wanted[name] == 1:
            assert len(answers) == 1, f"{place} was told {answers}"
    if walk.journal.status is RunStatus.DONE:
        _ended_well(walk, wanted)
    elif walk.journal.status is RunStatus.FAILED:
        # Equal requests side by side may take over each other's answers, another one in each attempt.
        assert _equal_side_by_side(walk.program) & walk.disturbed
    return walk


def _equal_side_by_side(program: Program) -> set[str]:
    return {
        ask.name
        for phase in program
        for n, branch in enumerate(phase)
        for ask in branch
        if any(ask.name == other.name for others in phase[n + 1 :] for other in others)
    }


def _ended_well(walk: Walk, wanted: Counter[str]) -> None:
    """The run ends with the same effects as a walk without a crash."""
    last = walk.journal.attempt
    for name, effect in NAMES.items():
        told = {body for attempt, given, body in walk.given if (attempt, given) == (last, name)}
        earlier = {body for _, given, body in walk.given if given == name}
        done = walk.upstream.done(name)
        if effect.is_effect and told:
            assert done >= 1, f"{name} was said to be done"
        if name not in walk.disturbed:
            assert earlier <= told, f"{name}: an answer was lost"
            assert len(told) == wanted[name]
            if effect.is_effect:
                assert wanted[name] <= done <= wanted[name] + walk.bold[name]


# ---- walks


@settings(max_examples=300)
@given(programs(1), orders, faults, kills, people)
def test_one_thing_after_the_other(
    program: Program, order: list[int], broken: list[Fault], killed: list[tuple[int, Kill]], who: list[Person]
) -> None:
    walked(Walk(program, order, list(broken), killed, list(who)))


@settings(max_examples=300)
@given(programs(4), orders, faults, kills, people)
def test_things_side_by_side(
    program: Program, order: list[int], broken: list[Fault], killed: list[tuple[int, Kill]], who: list[Person]
) -> None:
    walked(Walk(program, order, list(broken), killed, list(who)))


@settings(max_examples=100)
@given(programs(3), orders)
def test_without_faults_and_kills_nothing_is_out_of_the_ordinary(program: Program, order: list[int]) -> None:
    walk = walked(Walk(program, order, [], [], []))
    assert walk.journal.status is RunStatus.DONE
    assert walk.journal.attempt == 1
    assert walk.upstream.calls == +logical(program)


@settings(max_examples=100)
@given(programs(3), orders, st.lists(st.tuples(st.integers(1, 60), st.just(Kill.AGENT)), max_size=6))
def test_an_agent_that_dies_costs_nothing(program: Program, order: list[int], killed: list[tuple[int, Kill]]) -> None:
    """A killed agent, started again, does nothing twice: only reads are cancelled with it, and made again."""
    walk = walked(Walk(program, order, [], killed, []))
    assert walk.journal.status is RunStatus.DONE
    for name, effect in NAMES.items():
        if effect is not Effect.READ:
            assert walk.upstream.calls[name] == logical(program)[name]
    if all(len(phase) == 1 for phase in program):
        assert walk.sidecar.tape.drift == 0


# ---- each point, each victim, each class

ONCE = {effect: name for name, effect in NAMES.items()}


@pytest.mark.parametrize("effect", list(ONCE))
@pytest.mark.parametrize("kill", [Kill.AGENT, Kill.SIDECAR, Kill.MOVED, Kill.ISOLATED])
def test_one_request_killed_at_each_point(effect: Effect, kill: Kill) -> None:
    """In a world of one request a kill after *n* moves is a kill at each point in turn."""
    name = ONCE[effect]
    program: Program = (((Ask(name, effect),),),)
    calls = []
    for at in range(1, 7):
        walk = walked(Walk(program, [], [], [(at, kill)], []))
        assert walk.journal.status is RunStatus.DONE
        calls.append(walk.upstream.calls[name])
    # The points: asked, decided, intent written, bytes out, recorded, delivered.
    made_again = effect is Effect.READ or (kill is Kill.SIDECAR and effect is not Effect.AT_MOST_ONCE)
    assert calls == ([1, 1, 1, 2, 1, 1] if made_again else [1] * 6)


@pytest.mark.parametrize("effect", list(ONCE))
def test_one_request_with_two_things_going_wrong(effect: Effect) -> None:
    """Every fault with every kill at every point, and another one a little later."""
    for fault, one, two in product(Fault, Kill, Kill):
        for at, named in product(range(1, 6), (False, True)):
            program: Program = (((Ask(ONCE[effect], effect, named, tries=2),),),)
            walked(Walk(program, [], [fault], [(at, one), (at + 2, two)], []))


def test_twenty_equal_ones_and_ten_different_ones_side_by_side() -> None:
    equal = tuple((Ask("refund", Effect.IDEMPOTENT),) for _ in range(20))
    different = tuple((Ask(f"mail {n}", Effect.AT_MOST_ONCE),) for n in range(10))
    program: Program = ((*equal, *different),)
    order = [(7 * n * n + 3 * n) % 31 for n in range(61)]
    walk = Walk(program, order, [], [(n, Kill.AGENT) for n in range(5, 400, 20)], [])
    walk.run()
    assert walk.journal.status is RunStatus.DONE
    assert walk.journal.attempt > 10
    assert walk.upstream.calls.total() == 30
    told = [(name, body) for attempt, name, body in walk.given if attempt == walk.journal.attempt]
    assert len(set(told)) == 30
    assert all(body.startswith(name.encode()) for name, body in told)
