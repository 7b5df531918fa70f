"""The state machine: what may happen, in any order. What must hold meanwhile is ``promises``; at the end, ``ending``.

No rule has a precondition: which are possible depends on what real processes have done by now, and Hypothesis must be
able to draw the same choices again. A rule that is not possible does what comes next anyhow.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from runtime.failpoints import POINTS
from tests.model.agents import Ask, Attempt, Call
from tests.model.ending import come_to_an_end
from tests.model.judge import KINDS, Fate
from tests.model.promises import Promises
from tests.model.scene import Run, Scene
from tests.model.world import LEASE, NAMES, World

#: Among these two are often equal, and one is long.
asks = st.builds(Ask, st.sampled_from([*sorted(KINDS), "mail"]), st.sampled_from(["a", "b", "big"]), st.booleans())
homes = st.sampled_from(NAMES)
which = st.integers(0, 5)
#: Where a sidecar has something to lose.
points = st.sampled_from([*POINTS, *2 * ["before-intent", "intent-written", "before-first-byte", "before-record"]])


def happens(**choices: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A rule of what does not happen all the time: *before* it, what nearly always comes next does, up to twice."""

    def decorate(what: Callable[..., None]) -> Any:
        @wraps(what)
        def happen(machine: "Machine", before: int, **given: Any) -> None:
            for _ in range(before):
                machine.go_on()
            what(machine, **given)

        given: dict[str, Any] = {"before": st.integers(0, 2), **choices}
        made: Callable[[Any], Any] = rule(**given)
        return made(happen)

    return decorate


class Machine(RuleBasedStateMachine):
    """One example. ``world`` is set by the test."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(self.world)
        self.promises = Promises(self.scene)

    # ---- launchers

    @initialize(home=homes)
    def start(self, home: str) -> None:
        self.scene.claim(self.scene.begin(), home)

    @happens(home=homes)
    def start_another_run(self, home: str) -> None:
        if len(self.scene.runs) < 2 and self._can_start(home):
            self.scene.claim(self.scene.begin(), home)

    @happens(n=which, home=homes)
    def start_again(self, n: int, home: str) -> None:
        runs = [run for run in self._running() if not run.alive]
        if runs and self._can_start(home):
            self.scene.claim(runs[n % len(runs)], home)

    @happens(n=which, home=homes)
    def take_over(self, n: int, home: str) -> None:
        """Nobody hears of the attempt for longer than its lease; it may well live."""
        runs = [run for run in self._running() if run.alive]
        if runs and self._can_start(home):
            self.scene.time_passes(LEASE * 1.2)
            self.scene.claim(runs[n % len(runs)], home, by_clock=True)

    @happens(ask=asks, point=points, same=st.sampled_from([False, False, True]), by_clock=st.booleans(), steps=which)
    def zombie(self, ask: Ask, point: str, same: bool, by_clock: bool, steps: int) -> None:
        """A sidecar stands still with a request in hand; its run is taken over, goes on elsewhere, and so does it."""
        attempt = next((run.current for run in self._running() if run.current and self._goes_on(run.current)), None)
        if attempt is None:
            return
        home = attempt.home if same else NAMES[1 - NAMES.index(attempt.home)]
        if not self._can_start(home):
            return
        still = self.world.sidecars[attempt.home]
        if not self.world.sidecars[home].pid:
            self.world.sidecars[home].start()
        self._ask_up_to(point, attempt, ask)
        if still.still():
            if by_clock:
                self.scene.time_passes(LEASE * 1.2)
            else:
                self.scene.kill(attempt)
            self.scene.claim(self.scene.run(attempt.run), home, by_clock=by_clock)
            for _ in range(steps):
                self.go_on()
            self.scene.resume(still)
        still.arm(None)

    def _goes_on(self, attempt: Attempt) -> bool:
        sidecar = self.world.sidecars[attempt.home]
        return attempt.next_place() is not None and self.scene.at_home(attempt) and sidecar.works

    def _ask_up_to(self, point: str, attempt: Attempt, ask: Ask) -> None:
        """Its sidecar will stand still at *point* of what *attempt* asks next."""
        self.stand_still(attempt.home, point)
        self._ask(attempt, attempt.next_place() or 0, ask)
        for each in self.scene.open():
            if each.run == attempt.run and each.call == attempt.calls[-1].n:
                self.scene.decide(each, Fate.OK)

    def _running(self) -> list[Run]:
        return [run for run in self.scene.runs if not run.over]

    def _can_start(self, home: str) -> bool:
        sidecar = self.world.sidecars[home]
        return bool(sidecar.pid) or sidecar.gate.is_open

    # ---- agents

    @rule(n=which, ask=asks, reads=st.booleans())
    def request(self, n: int, ask: Ask, reads: bool) -> None:
        """An agent goes on, perhaps one whose run was taken over."""
        self._request(n, ask, reads) or self.go_on()  # type: ignore[func-returns-value]

    @rule(n=which, ask=asks)
    def request_and_answer(self, n: int, ask: Ask) -> None:
        self._request(n, ask, reads=True)
        self._decide(len(self.scene.open()) - 1, Fate.OK)

    def _request(self, n: int, ask: Ask, reads: bool) -> bool:
        able = [attempt for attempt in self.scene.attempts() if attempt.next_place() is not None]
        if able:
            attempt = able[-1 - n % len(able)]
            self._ask(attempt, attempt.next_place() or 0, ask, reads=reads)
        return bool(able)

    def _ask(self, attempt: Attempt, place: int, ask: Ask, *, reads: bool = True) -> None:
        """What the program says at *place*, or (where that has not been written) *ask*."""
        if place == len(attempt.program):
            ask = ask if reads else replace(ask, name="big")
            if any(call.ask.like(ask) for call in attempt.waiting()):
                return
            attempt.program.append(ask)
        # Of a short answer the kernel has all, whether or not its program ever reads it.
        self.scene.ask(attempt, place, reads=reads or attempt.program[place].name != "big")

    @rule(n=which)
    def retry(self, n: int) -> None:
        self._retry(n) or self.go_on()  # type: ignore[func-returns-value]

    def _retry(self, n: int) -> bool:
        able = [attempt for attempt in self.scene.attempts() if attempt.failed()]
        if able:
            attempt = able[-1 - n % len(able)]
            self.scene.ask(attempt, attempt.failed()[0])
        return bool(able)

    @happens(n=which, reset=st.booleans())
    def hang_up(self, n: int, reset: bool) -> None:
        calls = sorted(self._waiting(), key=lambda call: call.reads)
        if calls:
            self.scene.hang_up(calls[n % len(calls)], reset=reset)

    @happens(n=which)
    def read_on(self, n: int) -> None:
        calls = [call for call in self._waiting() if not call.reads]
        if calls:
            self.scene.read_on(calls[n % len(calls)])

    @happens(n=which, how=st.sampled_from(["unseen", "died", "failed", "handed_over"]))
    def kill_agent(self, n: int, how: str) -> None:
        attempts = self.scene.attempts()
        if not attempts:
            return
        attempt = attempts[-1 - n % len(attempts)]
        if how == "unseen" or not attempt.current:
            self.scene.kill(attempt)
        else:
            self.scene.end(attempt, how)

    @happens()
    def finish(self) -> None:
        """An agent has come to its end, and so has all that it asked for."""
        for run in self._running():
            attempt = run.current
            if attempt and attempt.alive and attempt.done() and not attempt.waiting():
                if not any(each.run == run.id for each in self.scene.open()):
                    self.scene.end(attempt, "done")

    def go_on(self) -> None:
        """What nearly always comes next: an agent is answered, or asks, or is started again."""
        runs = self._running()
        made = len(self.scene.calls())
        if not self._decide(0, Fate.OK) and runs:
            ask = Ask(sorted(KINDS)[made % len(KINDS)], "ab"[made % 2])
            self._go_on_with(runs[made % len(runs)], ask, reads=made % 5 < 4)

    def _go_on_with(self, run: Run, ask: Ask, *, reads: bool) -> None:
        attempt, home = run.current, NAMES[len(run.attempts) % len(NAMES)]
        if attempt is None or not attempt.alive or attempt.stopped:
            self.scene.settle_doubts(run, Fate.LOST)
            if self._can_start(home):
                self.scene.claim(run, home)
        elif not self.scene.at_home(attempt):
            self.scene.end(attempt, "handed_over")
        elif calls := [call for call in attempt.waiting() if not call.reads and call is not attempt.calls[-1]]:
            self.scene.hang_up(calls[0], reset=False)  # it has waited for long enough
        elif attempt.failed():
            self.scene.ask(attempt, attempt.failed()[0])
        elif (place := attempt.next_place()) is not None:
            self._ask(attempt, place, ask, reads=reads)

    def _waiting(self) -> list[Call]:
        return [call for attempt in self.scene.attempts() for call in attempt.waiting()]

    # ---- the upstream

    @rule(n=which)
    def answer(self, n: int) -> None:
        self._decide(n, Fate.OK) or self.go_on()  # type: ignore[func-returns-value]

    @happens(n=which, ask=asks, fate=st.sampled_from(Fate))
    def answer_somehow(self, n: int, ask: Ask, fate: Fate) -> None:
        if not self.scene.open():
            self._request(0, ask, reads=True)
        self._decide(n, fate)

    def _decide(self, n: int, fate: Fate) -> bool:
        came = self.scene.open()
        if came:
            self.scene.decide(came[n % len(came)], fate)
        return bool(came)

    # ---- sidecars and their database

    @happens(home=homes)
    def kill_sidecar(self, home: str) -> None:
        if self.world.sidecars[home].pid:
            self.scene.kill_sidecar(home)

    @happens(home=homes, point=points)
    def stand_still_at(self, home: str, point: str) -> None:
        self.stand_still(home, point)

    def stand_still(self, home: str, point: str) -> None:
        self.world.sidecars[home].arm(point)
        self.scene.say(f"{home} will stand still at {point}")

    @happens(home=homes)
    def pause(self, home: str) -> None:
        sidecar = self.world.sidecars[home]
        if sidecar.pid and not sidecar.still():
            sidecar.pause()
            self.scene.say(sidecar)

    @happens()
    def resume(self) -> None:
        for sidecar in self.world.sidecars.values():
            if sidecar.still():
                self.scene.resume(sidecar)

    @happens()
    def leases_end(self) -> None:
        """Of whoever stands still, or cannot reach the database."""
        self.scene.time_passes(LEASE * 1.2)

    @happens(home=homes)
    def database_refuses(self, home: str) -> None:
        self.world.run(self.world.gates[home].refuse)
        self.scene.say(f"Postgres is away for {home}")

    @happens(home=homes)
    def database_loses_an_answer(self, home: str) -> None:
        self.world.run(self.world.gates[home].lose)
        self.scene.say(f"{home} will not hear the next answer from Postgres")

    @happens()
    def database_returns(self) -> None:
        if not all(gate.is_open for gate in self.world.gates.values()):
            self.scene.database_returns()

    # ---- people

    @happens(unsure=st.sampled_from([Fate.LOST, Fate.DROPPED]))
    def settle_doubts(self, unsure: Fate) -> None:
        for run in self.scene.runs:
            self.scene.settle_doubts(run, unsure)

    # ---- what must hold

    @invariant()
    def promises_hold(self) -> None:
        self.promises.hold()

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            come_to_an_end(self.scene, self.promises)


#: So many examples in a row Hypothesis makes one independently of the other; then it begins to vary what it had.
_FRESH = 10


def explore(world: World, examples: int, rules: int, *, shrink: bool = True) -> None:
    """Play that many examples of that many rules; raise the AssertionError of the smallest that broke a promise."""

    class Here(Machine):
        pass

    Here.world = world
    for done in range(0, examples, _FRESH):
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=min(_FRESH, examples - done),
                stateful_step_count=rules,
                deadline=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            ),
        )
