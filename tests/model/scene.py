"""One example: runs, their attempts, what people and launchers do. Each verb waits for what must follow from it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from runtime import runs
from runtime.database import Connection
from runtime.errors import Held, NotNow
from runtime.step import RunStatus
from tests.model.agents import Ask, Attempt, Call
from tests.model.judge import Fate, Received
from tests.model.world import LEASE, Sidecar, World

#: For what may follow and need not: a request can be held for reasons that are not seen from outside.
SOON = 0.15
_SENT = "SELECT url, count(*) AS n FROM twiceshy.step WHERE run_id = $1 AND state = 'sent' GROUP BY url"


@dataclass(eq=False)
class Run:
    """A run, as those outside know it."""

    id: str
    program: list[Ask] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    launcher: str = "here"
    over: bool = False  # done
    told: dict[int, bytes] = field(default_factory=dict)  # by place: the final answer that an agent read whole

    @property
    def current(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def alive(self) -> bool:
        """The agent of its current attempt lives."""
        return self.current is not None and self.current.alive


class Scene:
    """Everything of one example."""

    def __init__(self, world: World) -> None:
        world.begin_example()
        self.world = world
        self.judge = world.judge
        self.runs: list[Run] = []
        self.story: list[str] = []
        self.unrecorded: set[int] = set()  # receipts whose sidecar was lost before their answer was recorded
        self.said_again: Counter[str | None] = Counter()  # by key: a person said that it goes out again
        self._count = 0

    def say(self, words: object) -> None:
        self.story.append(str(words))

    def fail(self, wrong: str) -> NoReturn:
        """A promise was broken: tell the whole story."""
        self.world.broken = "\n".join(["", wrong, "", *self.story])
        raise AssertionError(self.world.broken)

    # ---- what there is to do something with

    def attempts(self) -> list[Attempt]:
        """Agents that live, those of the past among them."""
        return [attempt for run in self.runs for attempt in run.attempts if attempt.alive]

    def calls(self) -> list[Call]:
        return [call for run in self.runs for attempt in run.attempts for call in attempt.calls]

    def open(self) -> list[Received]:
        """Requests about which the upstream has not decided. Of a read whose client went nobody will hear."""
        return [each for each in self.judge.log if each.open and not (each.kind == "read" and each.gone)]

    def at_home(self, attempt: Attempt) -> bool:
        """The sidecar process that the attempt began with is there."""
        return self.world.sidecars[attempt.home].pid == attempt.process

    def run(self, run_id: str) -> Run:
        return next(run for run in self.runs if run.id == run_id)

    # ---- launchers

    def begin(self) -> Run:
        """A new run."""
        run = Run(self.world.new_run())
        self.world.verb(lambda connection: runs.create(connection, run.id))
        self.runs.append(run)
        return run

    def claim(self, run: Run, home: str, *, by_clock: bool = False) -> Attempt | None:
        """Another attempt: its launcher knows that the one before is dead, or (*by_clock*) nobody has heard of it."""
        sidecar = self.world.sidecars[home]
        if not sidecar.pid:
            sidecar.start()
        launcher = f"elsewhere-{len(run.attempts)}" if by_clock else run.launcher

        async def work(connection: Connection) -> tuple[runs.Claim, dict[str, int]]:
            async with connection.transaction():
                await connection.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", run.id)
                sent = {row["url"]: row["n"] for row in await connection.fetch(_SENT, run.id)}
                claim = await runs.claim(
                    connection, run.id, kind="launcher", host=launcher, folder="/state", lease=LEASE,
                    proved_dead=not by_clock,
                )  # fmt: skip
            return claim, sent

        try:
            claim, sent = self.world.verb(work)
        except (NotNow, Held) as error:
            self.say(f"no new attempt of {run.id}: {type(error).__name__}")
            return None
        run.launcher = launcher
        for before in run.attempts:
            if before.fenced is None:
                before.fenced, before.sent_at_fence = len(self.judge.log), sent
        attempt = Attempt(run.id, claim.n, claim.token, home, sidecar.pid, sidecar.port, run.program)
        run.attempts.append(attempt)
        self.say(f"attempt {claim.n} of {run.id} at {sidecar}")
        return attempt

    def end(self, attempt: Attempt, outcome: str) -> str | None:
        """The process is gone, and its launcher writes it down."""
        self.kill(attempt)
        attempt.ended = True
        token = runs.hash_token(attempt.token)
        status = self.world.verb(
            lambda connection: runs.end_attempt(connection, attempt.run, token, outcome, None, final=False)
        )
        self.say(f"attempt {attempt.n} of {attempt.run} ends as {outcome}: {status}")
        if status is RunStatus.DONE:
            self.run(attempt.run).over = True
        return status

    def kill(self, attempt: Attempt) -> None:
        self.say(f"the agent of attempt {attempt.n} of {attempt.run} is gone")
        self.world.run(attempt.die)

    # ---- agents

    def ask(self, attempt: Attempt, place: int, *, reads: bool = True) -> Call:
        """A request, up to what follows from it: an answer, its arrival upstream, a sidecar that stands still."""
        self._count += 1
        ask = attempt.program[place]
        call = Call(
            self._count, attempt, place, ask, again=bool(attempt.at(place)), reads=reads, tell=self.world.tell,
            barred=any(call.refused == "ambiguous" for call in attempt.calls),
        )  # fmt: skip
        attempt.calls.append(call)
        url = self.judge.url(ask.kind, attempt.run, ask.name)
        self.world.do(call.begin(url))
        home = self.world.sidecars[attempt.home]

        def followed() -> bool:
            arrived = any(each.attempt == attempt.n and each.call == call.n for each in self.judge.of(attempt.run))
            return call.ending is not None or arrived or home.still()

        if home.works:
            held = any(each.open for each in self.judge.of(attempt.run, ask.kind, ask.name))
            others = any(not each.works for each in self.world.sidecars.values())
            self.world.wait(followed, SOON if held or others or not reads else 2.0)
        self.say(f"{attempt.run} attempt {attempt.n}: {call}")
        return call

    def hang_up(self, call: Call, *, reset: bool) -> None:
        self.world.run(lambda: call.hang_up(reset=reset))
        self.say(f"{call.attempt.run} attempt {call.attempt.n}: {call}")

    def read_on(self, call: Call) -> None:
        self.world.run(call.read_on)
        if self.world.sidecars[call.attempt.home].works:
            self.world.wait(lambda: call.ending is not None, SOON)
        self.say(f"{call.attempt.run} attempt {call.attempt.n}: reads on; {call}")

    # ---- the upstream

    def decide(self, received: Received, fate: Fate) -> None:
        """The upstream does it or not, and answers or not; then whatever follows."""
        before = len(self.judge.log)
        self.world.run(lambda: self.judge.decide(received, fate))
        self.say(received)
        sender = next(each for each in self.run(received.run).attempts if each.n == received.attempt)
        home = self.world.sidecars[sender.home]
        if not self.at_home(sender) or not home.works:
            return
        if fate in (Fate.LOST, Fate.DROPPED, Fate.CUT):
            self.world.skip(0.2)  # the sidecar's pause before it sends again
        waiting = [
            call
            for call in self.calls()
            if call.ending is None and call.reads and call.attempt.run == received.run
            and (call.ask.kind, call.ask.name) == (received.kind, received.name)
            and self.world.sidecars[call.attempt.home].works
        ]  # fmt: skip

        def followed() -> bool:
            return (
                len(self.judge.log) > before
                or home.still()
                or (self._settled(received, fate) and all(call.ending is not None for call in waiting))
            )

        self.world.wait(followed, SOON if fate is Fate.HALF else 1.0, look=0.005)

    def _settled(self, received: Received, fate: Fate) -> bool:
        """The journal shows what became of it."""
        if fate is Fate.HALF:
            return False
        url = self.judge.url(received.kind, received.run, received.name)
        return not any(row["url"] == url for row in self.world.fetch(_SENT, received.run))

    # ---- sidecars

    def kill_sidecar(self, name: str) -> None:
        sidecar = self.world.sidecars[name]
        pid = sidecar.pid
        sidecar.kill()
        self.say(f"{sidecar}")
        self.note_lost(lambda attempt: attempt.process == pid)
        cut = [call for call in self.calls() if call.attempt.process == pid and call.reads]
        self.world.wait(lambda: all(call.ending is not None for call in cut), 2.0)

    def note_lost(self, whose: Callable[[Attempt], bool]) -> None:
        """The sidecar of some attempts is dead, or as good as dead: what it has not recorded may be asked again."""
        for run in self.runs:
            mine = {attempt.n for attempt in run.attempts if whose(attempt)}
            recorded = self.recorded(run.id)
            for each in self.judge.of(run.id):
                if each.attempt in mine and each.answered not in recorded:
                    self.unrecorded.add(each.n)

    def recorded(self, run_id: str) -> set[bytes]:
        rows = self.world.fetch("SELECT body FROM twiceshy.answer WHERE run_id = $1 AND NOT own", run_id)
        return {row["body"] for row in rows if row["body"]}

    def resume(self, sidecar: Sidecar) -> None:
        """It goes on; what it was at comes to its end, or waits for somebody else."""
        sidecar.resume()
        pid = sidecar.pid

        def followed() -> bool:
            waiting = [
                call
                for call in self.calls()
                if call.ending is None and call.reads and call.attempt.process == pid
                and not any(each.open for each in self.judge.of(call.attempt.run, call.ask.kind, call.ask.name))
            ]  # fmt: skip
            return sidecar.still() or not waiting

        self.world.wait(followed, 2 * SOON)
        self.say(f"{sidecar} again")

    def database_returns(self) -> None:
        for gate in self.world.gates.values():
            self.world.run(gate.let_in)
        self.world.skip(2.0)  # whoever waits tries again
        for sidecar in self.world.sidecars.values():
            if sidecar.works:
                self.resume(sidecar)
        self.say("Postgres is back")

    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        rows = self.world.fetch(
            "SELECT pid FROM twiceshy.sidecar WHERE id = ANY($1::text[]) AND expires_at < twiceshy.now()",
            [sidecar.id for sidecar in self.world.sidecars.values()],
        )
        dead = {row["pid"] for row in rows}
        self.note_lost(lambda attempt: attempt.process in dead)
        self.say(f"{seconds:g} s pass" + "".join(f"; {each}" for each in self.world.sidecars.values()))

    # ---- people

    def settle_doubts(self, run: Run, unsure: Fate) -> None:
        """Somebody looks up each ambiguous step, and says what is true. What is still open becomes *unsure* first."""
        for row in self.world.fetch(
            "SELECT key, wire_key FROM twiceshy.step WHERE run_id = $1 AND state = 'ambiguous' ORDER BY begun", run.id
        ):
            came = [each for each in self.judge.of(run.id) if each.key == row["wire_key"]]
            for each in came:
                if each.open:
                    self.decide(each, unsure)
            if any(each.key == row["wire_key"] and each.open for each in self.judge.of(run.id)):
                return  # it was sent once more meanwhile
            how: runs.How = "assume_done" if any(each.fate and each.fate.does for each in came) else "send_again"
            say = partial(runs.resolve, run_id=run.id, step_key=row["key"], how=how, body=b'{"said":"by a person"}')
            try:
                status = str(self.world.verb(say))
                self.said_again[row["wire_key"]] += how == "send_again"
            except NotNow as error:  # a late answer settled it
                status = str(error)
            self.say(f"{run.id} step {row['key']}: {how}, {status}")
