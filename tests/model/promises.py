"""What must hold whatever happened, judged by what the upstream received and what agents read (DESIGN §2 to §5)."""

from collections import Counter
from collections.abc import Iterator

from runtime.step import Effect
from tests.model.agents import Call
from tests.model.judge import KINDS, Fate, Received
from tests.model.scene import Run, Scene

#: What a request may be refused with. An agent that walks the same way never diverges, and names its token always.
REFUSALS = {"fenced", "sidecar-changed", "not-running", "ambiguous", "database-away", "upstream", "upstream-timeout"}
_STEPS = "SELECT key, state, effect FROM twiceshy.step WHERE run_id = $1"
_ANSWERS = """
SELECT key, n, status, finality, own, md5(coalesce(body, '')) AS body FROM twiceshy.answer WHERE run_id = $1
"""
_STATUS = "SELECT status, stop_step FROM twiceshy.run WHERE id = $1"


class Promises:
    """Looks at a scene again and again; remembers what was final."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._final: dict[tuple[str, str, int], tuple[object, ...]] = {}

    def hold(self) -> None:
        """Raise AssertionError with the whole story when one was broken."""
        for wrong in self._wrongs():
            self._scene.fail(wrong)

    def _wrongs(self) -> Iterator[str]:
        scene = self._scene
        yield from scene.judge.wrongs
        for sidecar in scene.world.sidecars.values():
            if words := sidecar.ended():
                yield f"{sidecar.name} ended by itself: {words}"
        for run in scene.runs:
            yield from self._done_once(run)
            yield from self._paid_once(run)
            yield from self._fenced(run)
            yield from self._told(run)
            yield from self._journalled(run)
        for call in scene.calls():
            if call.refused is not None and call.refused not in REFUSALS:
                assert call.reply is not None
                yield f"{call}: {call.reply.body!r}"

    def _done_once(self, run: Run) -> Iterator[str]:
        """An effect is made once for each time that the program asks for it, and under one key each."""
        for (kind, name), wanted in _asked(run).items():
            if not KINDS[kind].is_effect:
                continue
            received = self._scene.judge.of(run.id, kind, name)
            keys = {each.key for each in received}
            effects = {each.effect for each in received if each.effect is not None}
            if len(keys) > wanted:
                yield f"{run.id} asks {wanted} times for {kind}/{name}, which came under {len(keys)} keys"
            if len(effects) > wanted:
                yield f"{run.id} asks {wanted} times for {kind}/{name}, which was done {len(effects)} times"
            if KINDS[kind] is Effect.AT_MOST_ONCE:
                yield from self._not_risked(received)

    def _not_risked(self, received: list[Received]) -> Iterator[str]:
        """What may be done once only is sent again where it was refused, or a person said so, and nowhere else."""
        for key in {each.key for each in received}:
            came = [each for each in received if each.key == key]
            may = 1 + self._scene.said_again[key] + sum(each.fate is Fate.LIMITED for each in came)
            if len(came) > may:
                yield f"it came {len(came)} times: {', '.join(map(str, came))}"
            for before in came[:-1]:
                if before.fate is None or before.fate.does:
                    yield f"{came[-1]} came after {before}"

    def _paid_once(self, run: Run) -> Iterator[str]:
        """A model is called again only where its answer was lost, or was none."""
        for (kind, name), wanted in _asked(run).items():
            if KINDS[kind] is not Effect.REPEATABLE:
                continue
            received = self._scene.judge.of(run.id, kind, name)
            if received and received[-1].n in self._scene.unrecorded:
                # What was thought to be lost is not, if it was recorded before anybody asked again.
                if received[-1].answered in self._scene.recorded(run.id):
                    self._scene.unrecorded.discard(received[-1].n)
            paid = [
                each
                for each in received
                if each.fate in (None, Fate.OK, Fate.HALF) and each.n not in self._scene.unrecorded
            ]
            if len(paid) > wanted:
                yield f"{run.id} asks {wanted} times for {kind}/{name}, which was called: {', '.join(map(str, paid))}"

    def _fenced(self, run: Run) -> Iterator[str]:
        """Of an attempt that was taken over nothing is sent any more but what was under way. Reads hurt nobody."""
        scene = self._scene
        for attempt in run.attempts:
            if attempt.fenced is None:
                continue
            for each in scene.judge.log[attempt.fenced :]:
                if each.run != run.id or each.attempt != attempt.n or each.kind == "read":
                    continue
                if not attempt.sent_at_fence.get(scene.judge.url(each.kind, each.run, each.name)):
                    yield f"{each}, though attempt {attempt.n} had been taken over"

    def _told(self, run: Run) -> Iterator[str]:
        """What an agent read whole, every attempt is told; and it is what the upstream said."""
        for attempt in run.attempts:
            for call in attempt.calls:
                reply = call.answered
                if reply is None or reply.status >= 300:
                    continue
                known = run.told.setdefault(call.place, reply.body)
                if known != reply.body:
                    yield f"{call} of attempt {attempt.n} was told {reply.body!r}, an earlier one {known!r}"
                if not self._said(run, call, reply.body):
                    yield f"{call} of attempt {attempt.n} was told {reply.body!r}, which nobody said"
                if call.barred:
                    yield f"{call} was answered, though attempt {attempt.n} had been told that its run is stopped"

    def _said(self, run: Run, call: Call, body: bytes) -> bool:
        came = self._scene.judge.of(run.id, call.ask.kind, call.ask.name)
        return b"by a person" in body or any(each.answered == body for each in came)

    def _journalled(self, run: Run) -> Iterator[str]:
        """What is final stays; a run is not done while somebody has to say what was done."""
        fetch = self._scene.world.fetch
        [status] = fetch(_STATUS, run.id)
        ambiguous = [row["key"] for row in fetch(_STEPS, run.id) if row["state"] == "ambiguous"]
        if status["status"] in ("diverged", "over_budget", "failed", "cancelled"):
            yield f"{run.id} is {status['status']}"
        if status["status"] == "done" and ambiguous:
            yield f"{run.id} is done, and its steps {ambiguous} are ambiguous"
        if status["status"] == "ambiguous" and status["stop_step"] not in ambiguous:
            yield f"{run.id} is ambiguous for {status['stop_step']}, and its ambiguous steps are {ambiguous}"
        for row in fetch(_ANSWERS, run.id):
            if row["finality"] == "final":
                now = (row["status"], row["body"])
                was = self._final.setdefault((run.id, row["key"], row["n"]), now)
                if was != now:
                    yield f"{run.id} step {row['key']}: answer {row['n']} was final, {was}, and is now {now}"


def _asked(run: Run) -> Counter[tuple[str, str]]:
    """How often the program has asked for what, in the attempt that went furthest."""
    places = {call.place for attempt in run.attempts for call in attempt.calls}
    return Counter((run.program[place].kind, run.program[place].name) for place in places)
