"""The end of an example: everything is let go on, doubts are settled, and each run walks to its end.

Then the effects are those of a run without a crash: each that the program asks for was made, once.
"""

from collections import Counter

from tests.model.agents import Attempt, Call
from tests.model.judge import KINDS, Fate
from tests.model.promises import Promises
from tests.model.scene import Run, Scene
from tests.model.world import NAMES

#: Attempts that a run may need to come to its end when nothing goes wrong any more.
_MOST = 12
_TRIES = 4


def come_to_an_end(scene: Scene, promises: Promises) -> None:
    """Let every run end; raise AssertionError where one does not, or ends otherwise than without a crash."""
    world = scene.world
    scene.say("---- the end")
    scene.database_returns()
    for sidecar in world.sidecars.values():
        if sidecar.still():
            scene.resume(sidecar)
        if not sidecar.pid:
            sidecar.start()
    world.run(lambda: scene.judge.answer_all(Fate.OK))
    for call in scene.calls():
        if not call.reads:
            world.run(call.read_on)
    _nobody_waits(scene)
    promises.hold()
    for n, run in enumerate(scene.runs):
        if not run.over:
            _walk(scene, run, NAMES[n % len(NAMES)])
            promises.hold()
        _as_without_a_crash(scene, run)


def _nobody_waits(scene: Scene) -> None:
    def waiting() -> list[str]:
        return [f"{call.attempt.run} {call}" for call in scene.calls() if call.ending is None]

    if not scene.world.wait(lambda: not waiting()):
        scene.fail(f"somebody waits for ever: {waiting()}")


def _walk(scene: Scene, run: Run, home: str) -> None:
    """Restart the agent until its program comes to its end."""
    for _ in range(_MOST):
        if run.current is not None and run.alive:
            scene.end(run.current, "died")
        scene.settle_doubts(run, Fate.LOST)
        attempt = scene.claim(run, home)
        if attempt is not None and _all_of_it(scene, attempt):
            scene.end(attempt, "done")
            return
    scene.fail(f"{run.id} does not come to its end")


def _all_of_it(scene: Scene, attempt: Attempt) -> bool:
    for place in range(len(attempt.program)):
        for _ in range(_TRIES):
            call = scene.ask(attempt, place)
            _wait_for(scene, call)
            if call.accepted or call.refused:
                break
        if not call.accepted:
            return False
    return True


def _wait_for(scene: Scene, call: Call) -> None:
    if not scene.world.wait(lambda: call.ending is not None):
        scene.fail(f"{call} waits for ever")


def _as_without_a_crash(scene: Scene, run: Run) -> None:
    attempt = run.current
    assert attempt is not None
    # Those that were taken over may have wanted more than that, after the run was done.
    places = sorted({call.place for call in attempt.calls})
    wanted = Counter((run.program[place].kind, run.program[place].name) for place in places)
    for (kind, name), count in wanted.items():
        if not KINDS[kind].is_effect:
            continue
        made = len({each.effect for each in scene.judge.of(run.id, kind, name) if each.effect is not None})
        # After a mail that failed the agent goes on without knowing: it may or may not have been sent.
        unknown = sum(
            (call := attempt.accepted(place)) is not None and call.reply is not None and call.reply.status >= 500
            for place in places
            if (run.program[place].kind, run.program[place].name) == (kind, name)
        )
        if not count - unknown <= made <= count:
            scene.fail(f"{run.id} asks {count} times for {kind}/{name}, which was done {made} times")
