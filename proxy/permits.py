"""Local steps: what an agent does itself, between the permit that it asks for and the output that it hands in.

The permit is no answer: nothing of it is journalled but that it was given. The output is the step's answer, and is
given in place of a permit from then on. A permit that is lost on its way to a living attempt is given again; one of a
dead attempt is taken over, or, where the step may be done at most once, stops the run (``proxy.exchange``).
"""

import asyncio
import json
from enum import Enum
from urllib.parse import quote
from uuid import UUID, uuid4

from proxy import keys, relay
from proxy.attempts import Attempts, Run
from proxy.exchange import Join, Send
from proxy.identity import INTERNAL
from proxy.incoming import Head
from proxy.refusals import Refusal
from proxy.relay import Client
from proxy.tape import Step, Where
from runtime import payload
from runtime.entries import Answer, AnswerFacts, AnswerRow, Begun, Fenced, Intent, Recorded, Stopped
from runtime.errors import UsageError
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Finality, Kind, State


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
        self._begun: dict[UUID, asyncio.Task[Refusal | None]] = {}
        self._finished: dict[UUID, asyncio.Task[None]] = {}

    # ---- permits

    async def give(self, run: Run, due: Send | Join, step: Step, client: Client) -> Given | Refusal:
        """Begin *step*, if it is not, and give its permit. Nothing is awaited before it is marked as begun.

        Raises Unheard.
        """
        if isinstance(due, Send):
            before, exchange = step.exchange, uuid4()
            step.where, step.place, step.exchange = Where.HERE, due.place, exchange
            self._begun[exchange] = asyncio.ensure_future(self._begin(run, due, step, before))
        exchange_here = step.exchange
        task = None if exchange_here is None else self._begun.get(exchange_here)
        refusal = None if task is None else await client.door.heard(asyncio.shield(task))
        if refusal is not None:
            return refusal
        if step.state is not State.SENT or step.exchange != exchange_here:
            return Given.LOST
        key = keys.derive(self._secret, run.uuid, step.key)
        address = f"http://{INTERNAL}/steps/{quote(step.key, safe='')}"
        body = json.dumps({"step": step.key, "idempotency_key": key, "finish": address}).encode("ascii")
        said = None
        if step.begun <= run.tape.since:
            said = await client.door.heard(self._journal.progress(run.run_id, step.key))
        if said is not None:  # an object of one member, as it was written
            body = body[:-1] + b", " + said.strip()[1:-1] + b"}"
        headers = ((b"Content-Type", b"application/json"), (b"Twiceshy-Step", step.key.encode("latin-1")))
        if not await relay.give(client, Head(201, b"Created", headers), body):
            return Given.UNHEARD
        if step.state is State.SENT:
            step.where = Where.NOWHERE  # it is the agent's now: who asks again does not ask for this permit
        return Given.DELIVERED

    async def _begin(self, run: Run, due: Send, step: Step, before: UUID | None) -> Refusal | None:
        """Write the intent; the refusal to give, or None: it is written, or the step has moved on."""
        exchange = step.exchange
        assert exchange is not None
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
            return None
        step.where, step.exchange = Where.NOWHERE, before
        if isinstance(outcome, Fenced | Stopped):
            run.refuse(run.outcome_refusal(outcome))
            return run.refusal
        run.outdated = True
        return None

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
        refusal = await self._attempts.prolong(run)
        if refusal is not None:
            return refusal
        if not await self._journal.save_progress(run.fence, key, step.exchange, body if said else None):
            return run.refusal or self._not_begun(run, key)
        return b""

    # ---- outputs

    async def finish(self, run: Run, key: str, body: bytes) -> Refusal | bytes:
        """Record *body* as what came of the step *key*; what is recorded, which is the first that was handed in."""
        step = run.tape.steps.get(key)
        if step is None or step.facts.kind is not Kind.LOCAL:
            return Refusal("not-found", f"Run {run.run_id} has no local step {key!r}.", run.run_id)
        try:
            handed_in = payload.read(body, self._settings.payload_max, "the body")
            if not isinstance(handed_in, dict) or len(handed_in) != 1 or not handed_in.keys() & {"output", "error"}:
                raise UsageError('the body is {"output": …} or {"error": …}')
        except UsageError as error:
            return Refusal("bad-request", f"Step {key} of run {run.run_id}: {error}.", run.run_id, key)
        if step.state is State.SENT and step.claimed and step.exchange is not None:
            exchange = step.exchange
            if exchange not in self._finished:
                self._finished[exchange] = asyncio.ensure_future(self._finish(run, step, exchange, body))
            await asyncio.shield(self._finished[exchange])
        if run.refusal is not None:
            return run.refusal
        if step.state is not State.ANSWERED or step.last is None:
            return self._not_begun(run, key)
        row = step.last
        return row.facts.body or await self._journal.small_body(run.run_id, key, row.n)

    async def _finish(self, run: Run, step: Step, exchange: UUID, body: bytes) -> None:
        headers = ((b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body)))
        facts = AnswerFacts(200, b"OK", headers, body, None, len(body), True, Finality.FINAL)
        try:
            reach("before-record")
            outcome = await self._journal.write(Answer(run.run_id, step.key, exchange, run.tape.attempt, facts))
            if not isinstance(outcome, Recorded):
                # Another attempt has the step by now, and this one is about to hear of it.
                await self._attempts.confirmed(run)
                await self._attempts.refresh(run)
                return
            reach("recorded")
            run.tape.record(step, AnswerRow(step.place, outcome.recorded, run.tape.attempt, facts))
            step.had = len(step.answers)  # who hands it in has it
        finally:
            del self._finished[exchange]

    @staticmethod
    def _not_begun(run: Run, key: str) -> Refusal:
        return Refusal(
            "bad-request",
            f"Step {key} of run {run.run_id} is not open in this attempt: POST /steps gives the permit for it.",
            run.run_id,
            key,
        )
