"""Local steps: what an agent does itself, between the permit that it asks for and the output that it hands in.

The permit is no answer: nothing of it is journalled but that it was given. The output is the step's answer, and is
given in place of a permit from then on. A permit that is lost on its way to a living attempt is given again; one of a
dead attempt is taken over, or, where the step may be done at most once, stops the run (``proxy.exchange``). How often a
step is begun, and how long a permit holds, its policy says (``proxy.policy``).
"""

import asyncio
import json
from dataclasses import replace
from enum import Enum
from urllib.parse import quote
from uuid import UUID, uuid4
from weakref import WeakValueDictionary

from proxy import keys, relay
from proxy.attempts import Attempts
from proxy.exchange import Join, Send
from proxy.identity import INTERNAL
from proxy.incoming import Head
from proxy.overdue import Overdue
from proxy.own import Asked
from proxy.policy import Permit, gave_up
from proxy.refusals import Refusal
from proxy.relay import Client
from proxy.run import Run
from proxy.tape import Step, Where
from runtime import payload
from runtime.entries import Answer, AnswerFacts, AnswerRow, Begun, Fenced, Intent, Recorded, Stopped
from runtime.errors import UsageError
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.names import shortened
from runtime.settings import Settings
from runtime.step import Effect, Finality, Kind, State

_JSON = ((b"Content-Type", b"application/json"),)


class Given(Enum):
    """What became of a permit that was due."""

    DELIVERED = "delivered"
    UNHEARD = "unheard"  # its client has gone
    LOST = "lost"  # the step has moved on: it must be decided again


class Permits:
    """Gives permits and takes outputs. One per sidecar."""

    def __init__(self, journal: Journal, attempts: Attempts, settings: Settings, secret: bytes) -> None:
        self._journal = journal
        self._attempts = attempts
        self._settings = settings
        self._secret = secret
        self._overdue = Overdue(attempts, settings)
        self._begun: dict[UUID, asyncio.Task[Refusal | None]] = {}
        self._turns: WeakValueDictionary[UUID | None, asyncio.Lock] = WeakValueDictionary()  # of exchanges
        self._finished: dict[UUID, asyncio.Task[None]] = {}

    # ---- permits

    async def look(self, run: Run, asked: Asked) -> Refusal | None:
        """Before a step of a transaction is decided on: what was recorded past this sidecar. Raises DatabaseAway."""
        if asked.token is None:
            return Refusal(
                "no-attempt",
                f"The step {asked.own.subject!r} of run {run.run_id} is recorded with its attempt's token, and the run "
                f"is named without one. Start the agent with `twiceshy run --run {run.run_id} -- COMMAND`, or give it "
                f"a token of `twiceshy claim {run.run_id}`.",
                run.run_id,
            )
        await self._attempts.look(run)
        return None

    async def give(self, run: Run, due: Send | Join, step: Step, client: Client, asked: Asked) -> Given | Refusal:
        """Begin *step*, if it is not, and give its permit. Nothing is awaited before it is marked as begun.

        One that was begun often enough is not: that nothing came of it is recorded. Raises Unheard.
        """
        if isinstance(due, Send):
            if due.replaces is not None and asked.policy.spent(step.tries):
                self._give_up(run, due, step, asked)
            else:
                self._start(run, due, step, Permit(uuid4(), asked.policy, asked.transaction, asked.token))
        exchange_here = step.exchange
        task = None if exchange_here is None else self._begun.get(exchange_here)
        refusal = None if task is None else await client.door.heard(asyncio.shield(task))
        if refusal is not None:
            return refusal
        if step.facts.effect is not Effect.AT_MOST_ONCE:
            return await self._hand_over(run, step, exchange_here, client)
        # To one of those who ask for it at once; who comes behind him asks for a step that is begun.
        turn = self._turns.setdefault(exchange_here, asyncio.Lock())
        await client.door.heard(turn.acquire())
        try:
            if step.where is not Where.HERE:
                return Given.LOST
            return await self._hand_over(run, step, exchange_here, client)
        finally:
            turn.release()

    async def _hand_over(self, run: Run, step: Step, exchange: UUID | None, client: Client) -> Given:
        """Give the permit of *step*, if it still is under *exchange*. Raises Unheard."""
        if step.state is not State.SENT or step.exchange != exchange:
            return Given.LOST
        head, body = await client.door.heard(self._permit(run, step))
        if not await relay.give(client, head, body):
            return Given.UNHEARD
        if step.state is State.SENT:
            step.where = Where.NOWHERE  # it is the agent's now: who asks again does not ask for this permit
            self._clock(run, step)  # it begins anew: the time on the way is not the agent's
        return Given.DELIVERED

    async def _permit(self, run: Run, step: Step) -> tuple[Head, bytes]:
        """The permit of *step*, which is begun."""
        told: dict[str, object] = {
            "step": step.key,
            "idempotency_key": keys.derive(self._secret, run.uuid, step.key),
            "finish": f"http://{INTERNAL}/steps/{quote(step.key, safe='')}",
            "try": step.tries,
        }
        permit = run.permits.get(step.key)
        if permit is not None and permit.transaction:
            told |= {"run": run.run_id, "token": permit.token}
        body = json.dumps(told).encode("ascii")
        said = await self._journal.progress(run.run_id, step.key) if step.tries > 1 else None
        if said is not None:  # an object of one member, as it was written
            body = body[:-1] + b", " + said.strip()[1:-1] + b"}"
        return Head(201, b"Created", (*_JSON, (b"Twiceshy-Step", step.key.encode("latin-1")))), body

    def _start(self, run: Run, due: Send, step: Step, permit: Permit) -> None:
        """Have *step* begun under *permit*."""
        before = step.exchange
        step.where, step.place, step.exchange = Where.HERE, due.place, permit.exchange
        self._begun[permit.exchange] = asyncio.ensure_future(self._begin(run, due, step, before, permit))

    async def _begin(self, run: Run, due: Send, step: Step, before: UUID | None, permit: Permit) -> Refusal | None:
        """Write the intent; the refusal to give, or None: it is written, or the step has moved on."""
        exchange = permit.exchange
        try:
            reach("before-intent")
            outcome = await self._journal.write(Intent(run.fence, step.facts, exchange, due.place, due.replaces))
        except BaseException:
            step.where, step.exchange = Where.NOWHERE, before
            raise
        finally:
            del self._begun[exchange]
        if isinstance(outcome, Begun):
            reach("intent-written")
            run.tape.began(step, outcome.begun)
            step.first_sent_at = step.first_sent_at or outcome.first_sent_at.timestamp()
            step.state = State.SENT
            step.tries += 1
            run.permits[step.key] = permit
            self._clock(run, step)
            self._overdue.watch(run, step, permit)
            return None
        step.where, step.exchange = Where.NOWHERE, before
        if isinstance(outcome, Fenced | Stopped):
            run.refuse(run.outcome_refusal(outcome))
            return run.refusal
        run.outdated = True
        return None

    def _clock(self, run: Run, step: Step) -> None:
        """The time of the permit begins."""
        permit = run.permits.get(step.key)
        if permit is not None:
            permit.given = permit.beaten = asyncio.get_running_loop().time()

    def _give_up(self, run: Run, due: Send, step: Step, asked: Asked) -> None:
        """Have it recorded that nothing came of *step*, under the exchange that it was begun by last."""
        exchange = due.replaces
        assert exchange is not None
        words = gave_up(run.run_id, step.key, asked.own.subject or "", step.tries, asked.policy)
        step.where, step.exchange = Where.HERE, exchange

        async def record() -> None:
            try:
                await self._record(run, step, exchange, json.dumps({"error": words}).encode("ascii"), own=True)
            finally:
                step.where = Where.NOWHERE
                del self._begun[exchange]

        self._begun[exchange] = asyncio.ensure_future(record())

    async def beat(self, run: Run, key: str, body: bytes) -> Refusal | bytes:
        """The step *key* is being done: the lease lasts longer, and what *body* says of its progress is kept."""
        step = run.tape.steps.get(key)
        try:
            said = payload.read(body, self._settings.payload_max, "the body") if body.strip() else {}
            if not isinstance(said, dict) or not said.keys() <= {"progress"}:
                raise UsageError('the body is {"progress": …}, or empty')
        except UsageError as error:
            return Refusal("bad-request", f"Step {key} of run {run.run_id}: {error}.", run.run_id, key)
        if step is None or not step.claimed or step.exchange is None or step.state is not State.SENT:
            return self._not_begun(run, key)
        if key in run.permits:
            run.permits[key].beaten = asyncio.get_running_loop().time()
        refusal = await self._attempts.prolong(run)
        if refusal is not None:
            return refusal
        if not await self._journal.save_progress(run.fence, key, step.exchange, body if said else None):
            return run.refusal or self._not_begun(run, key)
        return b""

    # ---- outputs

    async def finish(self, run: Run, key: str, body: bytes) -> Refusal | bytes | tuple[Head, bytes]:
        """Record *body* as what came of the step *key*; what is recorded, which is the first that was handed in.

        An error after which it is to be tried again gives another permit instead, while its policy allows that.
        """
        step = run.tape.steps.get(key)
        if step is None or step.facts.kind is not Kind.LOCAL:
            return Refusal("not-found", f"Run {run.run_id} has no local step {shortened(key)!r}.", run.run_id)
        try:
            handed_in = payload.read(body, self._settings.payload_max, "the body")
            again = _again(handed_in)
        except UsageError as error:
            return Refusal("bad-request", f"Step {key} of run {run.run_id}: {error}.", run.run_id, key)
        permit = run.permits.get(key)
        if permit is not None and permit.transaction:
            await self._attempts.look(run)
            if step.state is State.SENT and "output" in handed_in:
                return Refusal(
                    "bad-request",
                    f"Step {key} of run {run.run_id} is one of a transaction: its output is recorded by "
                    "twiceshy.record_step there. Only an error is handed in here.",
                    run.run_id,
                    key,
                )
        if step.state is State.SENT and step.claimed and step.exchange is not None:
            exchange = step.exchange
            if again and permit is not None and exchange not in self._finished:
                if not permit.policy.spent(step.tries) or step.where is Where.HERE:
                    return await self._try_again(run, step, permit)
                body = b'{"error": ' + (payload.member(body, "error") or b"null") + b"}"
            if exchange not in self._finished:
                self._finished[exchange] = asyncio.ensure_future(self._finish(run, step, exchange, body))
            await asyncio.shield(self._finished[exchange])
        if run.refusal is not None:
            return run.refusal
        return await self._recorded(run, step)

    async def recorded(self, run: Run, key: str) -> Refusal | bytes:
        """What is recorded of the step *key*; nothing while it is open."""
        step = run.tape.steps.get(key)
        if step is None or step.facts.kind is not Kind.LOCAL:
            return Refusal("not-found", f"Run {run.run_id} has no local step {shortened(key)!r}.", run.run_id)
        await self._attempts.look(run)
        return b"" if step.state is State.SENT else await self._recorded(run, step)

    async def _recorded(self, run: Run, step: Step) -> Refusal | bytes:
        if step.state is not State.ANSWERED or step.last is None:
            return self._not_begun(run, step.key)
        row = step.last
        return row.facts.body or await self._journal.small_body(run.run_id, step.key, row.n)

    async def _try_again(self, run: Run, step: Step, permit: Permit) -> Refusal | bytes | tuple[Head, bytes]:
        """Another permit, in the place of *permit*. Who is just given one gets the same."""
        if step.where is not Where.HERE:
            due = Send(step, step.facts.occurrence, step.place, step.exchange)
            self._start(run, due, step, replace(permit, exchange=uuid4()))
        exchange = step.exchange
        task = None if exchange is None else self._begun.get(exchange)
        refusal = None if task is None else await asyncio.shield(task)
        if refusal is not None or run.refusal is not None:
            return refusal or run.refusal or self._not_begun(run, step.key)
        if run.outdated:  # a transaction was just on its way, and has recorded it
            await self._attempts.refresh(run)
        if step.state is not State.SENT or step.exchange != exchange:
            return await self._recorded(run, step)
        step.where = Where.NOWHERE
        return await self._permit(run, step)

    async def _finish(self, run: Run, step: Step, exchange: UUID, body: bytes) -> None:
        try:
            await self._record(run, step, exchange, body)
        finally:
            del self._finished[exchange]

    async def _record(self, run: Run, step: Step, exchange: UUID, body: bytes, *, own: bool = False) -> None:
        """Write *body* down as the answer of *step*, if *exchange* still has it. *own*: nobody handed it in."""
        headers = (*_JSON, (b"Content-Length", b"%d" % len(body)))
        facts = AnswerFacts(200, b"OK", headers, body, None, len(body), True, Finality.FINAL, own)
        reach("before-record")
        outcome = await self._journal.write(Answer(run.run_id, step.key, exchange, run.tape.attempt, facts))
        if not isinstance(outcome, Recorded):
            # Another attempt has the step by now, and this one is about to hear of it; or a transaction recorded it.
            await self._attempts.confirmed(run)
            step.where = Where.NOWHERE
            await self._attempts.refresh(run)
            return
        reach("recorded")
        run.permits.pop(step.key, None)
        run.tape.record(step, AnswerRow(step.place, outcome.recorded, run.tape.attempt, facts))
        if not own:
            step.had = len(step.answers)  # who hands it in has it

    async def close(self) -> None:
        """End no more attempts."""
        await self._overdue.close()

    @staticmethod
    def _not_begun(run: Run, key: str) -> Refusal:
        return Refusal(
            "bad-request",
            f"Step {key} of run {run.run_id} is not open in this attempt: POST /steps gives the permit for it.",
            run.run_id,
            key,
        )


def _again(handed_in: object) -> bool:
    """Whether what was *handed in* is an error after which its step is to be tried again. Raises UsageError."""
    fields = handed_in.keys() if isinstance(handed_in, dict) else set()
    if fields not in ({"output"}, {"error"}, {"error", "again"}):
        raise UsageError('the body is {"output": …}, {"error": …}, or {"error": …, "again": true}')
    assert isinstance(handed_in, dict)
    again = handed_in.get("again", False)
    if not isinstance(again, bool):
        raise UsageError("again: true or false")
    return again
