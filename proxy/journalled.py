"""A journalled request, from its step to the last byte of its answer: decide, then carry it out.

The decision is ``proxy.exchange``'s; what is done about it happens here, in the request's own task, and upstream
in the exchange's (``proxy.recorder``).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from proxy import canonical, keys, mcp, relay
from proxy.attempts import Attempts
from proxy.difference import difference
from proxy.doors import Door
from proxy.exchange import (
    Ambiguous,
    Arrival,
    Beat,
    Decision,
    Diverged,
    Drop,
    Join,
    NoAttempt,
    Replay,
    Send,
    Wait,
    decide,
    is_repeat,
)
from proxy.lines import Unheard
from proxy.mcp import Call
from proxy.message import Request
from proxy.own import Asked
from proxy.permits import Given, Permits
from proxy.profiles import Rule, Rules
from proxy.recorder import Ending, Exchange, Shell
from proxy.refusals import Refusal, ways_out
from proxy.relay import Client
from proxy.run import Run
from proxy.sending import Sending
from proxy.stops import ambiguous_message
from proxy.tape import Part, Step, Where
from runtime.entries import AnswerRow, Fenced, Recorded, Stop, Stopped
from runtime.failpoints import reach
from runtime.step import Effect, Kind, RunStatus, State

T = TypeVar("T")
#: A body larger than this, or one that grows when it is undone, is read off the event loop.
_OFF_LOOP = 256 << 10
#: DESIGN §3.3: how long a FIN may be on its way.
_BEAT = 0.05
#: DESIGN §3.3: a reset this soon after a delivery undoes it.
_RESET_WINDOW = 1.0
#: Turns of the event loop that a task may need to notice that its client is gone.
_TURNS = 20
#: How often a request is decided again after what was due for it got lost: more would be no coincidence.
_LOSSES = 4


class Journalled:
    """Answers journalled requests. One per sidecar."""

    def __init__(self, shell: Shell, attempts: Attempts, rules: Rules, secret: bytes) -> None:
        self._shell = shell
        self._settings = shell.settings
        self._attempts = attempts
        self._rules = rules
        self._secret = secret
        self._sending = Sending(shell.journal, rules, shell.settings, secret)
        self.permits = Permits(shell.journal, attempts, shell.settings, secret)

    async def answer(
        self, run: Run, request: Request, rule: Rule, explicit: str | None, client: Client, asked: Asked | None = None
    ) -> Refusal | None:
        """Serve *request* of *run*; the refusal to give, or None when the answer was given. Raises DatabaseAway.

        *asked*: the step of the sidecar's own that it is.
        """
        arrival = await self._arrival(run, request, rule, explicit, asked)
        for _ in range(_LOSSES):
            if asked is not None and asked.transaction and (refusal := await self.permits.look(run, asked)) is not None:
                return refusal
            with run.understanding(client.door):
                due = await self._due(run, arrival, client)
            # Nothing may be awaited between this decision and its first consequence.
            if due is None or isinstance(due, Refusal):
                return due
            if isinstance(due, Send) and due.step is None and asked is not None and asked.refused is not None:
                return asked.refused
            run.delivered.clear()
            if isinstance(due, Replay):
                return await self._replay(run, due, rule, arrival, client)
            if isinstance(due, Send | Join):
                carry_out = self._permit if arrival.kind is Kind.LOCAL else self._exchange
                lost = await carry_out(run, due, request, rule, arrival, client, asked)
                if lost is not True:
                    return lost or None
            elif (refusal := await self._stop(run, due, request)) is not None:
                return refusal
        return None

    async def _due(
        self, run: Run, arrival: Arrival, client: Client
    ) -> Replay | Join | Send | Ambiguous | Diverged | NoAttempt | Refusal | None:
        """What is due for a request, once it need not wait any more; None: its client has gone meanwhile."""
        while True:
            if run.outdated:
                await self._attempts.refresh(run)
            await self._look(run, arrival)
            if run.refusal is not None:
                return run.refusal
            gone, strays = client.door.look(), run.strays(client.door)
            decision = self._decide(run, replace(arrival, gone=gone, strays=strays))
            if isinstance(decision, Drop):
                return None
            if isinstance(decision, Beat):
                await asyncio.sleep(_BEAT)
                arrival = replace(arrival, beaten=True)
            elif isinstance(decision, Wait):
                await asyncio.sleep(self._settings.poll)
                await self._attempts.refresh(run)
                if client.door.gone:
                    run.turned_away += 1
                    return None
            else:
                return decision

    async def _arrival(
        self, run: Run, request: Request, rule: Rule, explicit: str | None, asked: Asked | None
    ) -> Arrival:
        fingerprint = await read_apart(request, lambda: canonical.fingerprint(request, rule))
        signal = keys.retry_signal(request, rule)
        return Arrival(
            effect=rule.effect,
            fingerprint=fingerprint,
            secondary=canonical.secondary(request, rule, self._secret),
            explicit=explicit,
            again=signal.again,
            token=signal.token,
            token_is_call=rule.key is not None and rule.key.kept_over_retries,
            tokenless=run.tokenless,
            retention=rule.retention(request.method),
            signed=keys.signed(request),
            kind=Kind.HTTP if asked is None else asked.own.kind,
        )

    async def _look(self, run: Run, arrival: Arrival) -> None:
        """See which clients of equal requests are gone, or have their answer, before deciding on the next.

        And whether one that had its answer has reset its connection, so that it did not.
        """
        for door in list(run.delivered):
            door.look()
        for _ in range(_TURNS):
            pending = False
            for door, step in run.serving.items():
                if step is not None and step.facts.fingerprint == arrival.fingerprint:
                    if door.look():
                        pending = True
                    elif door.answered:
                        door.believe()
                        pending = True
            if not pending:
                return
            # Their tasks have been woken; each needs a turn of the loop to tell the tape.
            await asyncio.sleep(0)

    def _decide(self, run: Run, arrival: Arrival) -> Decision:
        if run.stale and arrival.effect is not Effect.READ and arrival.explicit is None:
            return NoAttempt(run.stale)
        return decide(run.tape, arrival, run.now(), self._settings.mode)

    async def _replay(self, run: Run, due: Replay, rule: Rule, arrival: Arrival, client: Client) -> Refusal | None:
        step, row = due.step, due.step.answers[due.n]
        self._claim(run, step, arrival, Part.REPLAYED, client)
        self._saved(run, row, rule, due.n >= step.had)
        delivered = False
        try:
            extra = ((b"Twiceshy-Replayed", b"true"), _step_header(step))
            body, asked = await self._body(run, step, row, client), await self._asked(run, step, row, client)
            delivered = await relay.replay(client, row, body, extra, asked)
        except Unheard:
            pass
        finally:
            self._delivered(run, step, due.n, client.door, delivered and not _undone(client.door, rule), rule)
        return None

    async def _body(self, run: Run, step: Step, row: AnswerRow, client: Client) -> AsyncIterator[bytes] | bytes:
        facts = row.facts
        if facts.body is not None:
            return facts.body
        if facts.body_id is not None:
            return self._shell.journal.parts(run.run_id, facts.body_id)
        if facts.size == 0:
            return b""
        return await client.door.heard(self._shell.journal.small_body(run.run_id, step.key, row.n))

    async def _asked(self, run: Run, step: Step, row: AnswerRow, client: Client) -> Call | None:
        """The call that *step* was made by, where its names must be known to put others in their place.

        What responds to one request only responds to that call, which may have gone again under a newer name.
        """
        if client.call is None or row.facts.own:
            return None
        if not client.call.batch:
            through, found = mcp.responding(row.facts.headers)
            pieces = relay.led(through, await self._body(run, step, row, client))
            while await client.door.heard(anext(pieces, None)) is not None:
                pass
            if len(found) < 2:
                return None
        body = await client.door.heard(self._sending.first_body(run, step))
        return mcp.call(step.facts.method, (), body)

    async def _exchange(
        self, run: Run, due: Send | Join, request: Request, rule: Rule, arrival: Arrival, client: Client,
        asked: Asked | None,
    ) -> bool:  # fmt: skip
        """Give the client the answer of an exchange. True: it was lost before the client had anything of it."""
        if isinstance(due, Join):
            step, exchange, part = due.step, run.exchange_of(due.step), Part.JOINED
        else:
            step, exchange = self._begin(run, due, request, rule, arrival, client.call, asked)
            part = Part.LIVE
        self._claim(run, step, arrival, part, client)
        exchange.attach()
        delivered, written = False, client.door.written
        try:
            delivered = await relay.relay(client, exchange, (_step_header(step),))
        finally:
            delivered = exchange.detach() or (delivered and not _undone(client.door, rule))
            if part is Part.JOINED and exchange.row is not None and exchange.attempt != run.tape.attempt:
                self._saved(run, exchange.row, rule, True)
            self._delivered(run, step, exchange.place, client.door, delivered, rule)
        self._note_elsewhere(run, request, rule, exchange)
        lost = exchange.ending is Ending.LOST and client.door.written == written and not client.door.gone
        if lost:
            await exchange.over()
        return lost

    async def _permit(
        self, run: Run, due: Send | Join, request: Request, rule: Rule, arrival: Arrival, client: Client,
        asked: Asked | None,
    ) -> bool | Refusal:  # fmt: skip
        """Give the client the permit for a local step. True: it was lost before the client had anything of it."""
        step = due.step if isinstance(due, Join) else self._sending.step(run, due, request, rule, arrival, asked)[0]
        self._claim(run, step, arrival, Part.JOINED if isinstance(due, Join) else Part.LIVE, client)
        given: Given | Refusal = Given.UNHEARD
        try:
            assert asked is not None
            given = await self.permits.give(run, due, step, client, asked)
        except Unheard:
            pass
        finally:
            delivered = given is Given.DELIVERED and not _undone(client.door, rule)
            self._delivered(run, step, step.place, client.door, delivered, rule)
        return given if isinstance(given, Refusal) else given is Given.LOST

    def _note_elsewhere(self, run: Run, request: Request, rule: Rule, exchange: Exchange) -> None:
        head = exchange.answer.head
        if rule.protocol == "mcp" and exchange.call is not None and head is not None and head.status == 202:
            run.note(
                f"{request.host}: speaks MCP's old HTTP+SSE transport, whose answers come in another stream than the "
                "calls' own: a restarted agent cannot go on there. Use streamable HTTP."
            )

    def _begin(
        self, run: Run, due: Send, request: Request, rule: Rule, arrival: Arrival, call: Call | None,
        asked: Asked | None,
    ) -> tuple[Step, Exchange]:  # fmt: skip
        """Put the step and its exchange on the tape, and start it."""
        tape = run.tape
        if due.drift:
            tape.drift += 1
        step, sent = self._sending.step(run, due, request, rule, arrival, asked)
        recall = partial(self._sending.first, run, step, request, rule, call) if due.first else None
        exchange = Exchange(
            self._shell,
            run,
            run.run_id,
            sent.request,
            rule,
            step,
            place=due.place,
            replaces=due.replaces,
            recall=recall,
            call=call,
            asked=asked,
        )
        step.where = Where.HERE
        step.place = due.place
        run.exchanges[exchange.id] = exchange
        exchange.start()
        return step, exchange

    # ---- what is told to the tape

    def _claim(self, run: Run, step: Step, arrival: Arrival, part: Part, client: Client) -> None:
        tape = run.tape
        if run.tokenless and arrival.explicit is None and is_repeat(tape, arrival, step):
            tape.repeated = True
        tape.attach(step, part)
        run.serving[client.door] = step
        if arrival.token is not None:
            tape.tokens[arrival.token] = step.key

    def _saved(self, run: Run, row: AnswerRow, rule: Rule, first: bool) -> None:
        """An LLM call that an earlier attempt paid for serves this one."""
        if first and rule.dialect is not None and row.attempt != run.tape.attempt and not row.facts.own:
            run.tape.calls_saved += 1
            run.tape.tokens_saved += row.facts.tokens

    def _delivered(self, run: Run, step: Step, n: int, door: Door, delivered: bool, rule: Rule) -> None:
        run.serving.pop(door, None)
        run.tape.detach(step, n, delivered=delivered)
        if delivered:
            reach("delivered")
        run.idle_since = time.monotonic()
        if not delivered or rule.ending is not None:
            return
        tape = run.tape

        def undo() -> None:
            if run.delivered.get(door) is undo:
                tape.undeliver(step, n)

        def forget() -> None:
            door.look()  # a process that stood still has not seen yet what happened in time
            if run.delivered.get(door) is undo:
                del run.delivered[door]

        run.delivered[door] = door.on_reset = undo
        asyncio.get_running_loop().call_later(_RESET_WINDOW, forget)

    async def _stop(self, run: Run, due: Ambiguous | Diverged | NoAttempt, request: Request) -> Refusal | None:
        """Stop the run, or refuse just this. None: the step has moved on, so it must be decided again."""
        if isinstance(due, NoAttempt):
            return Refusal(
                "no-attempt",
                f"{request.method} {request.authority}{request.path} for run {run.run_id} is refused: {due.why}, so "
                f"nobody can say whether this is a restart or a second one. Nothing was sent. {ways_out(run.run_id)}",
                run.run_id,
            )
        step = due.step
        if isinstance(due, Diverged):
            status = RunStatus.DIVERGED
            message = (
                f"Run {run.run_id} is stopped: step {step.key} was {step.facts.method} {step.facts.url}, and now it is "
                f"{request.method} {request.authority}{request.path}"
                f"{await self._differences(run, step, request)}. Nothing was sent. "
                "Give the new request another Twiceshy-Step."
            )
            entry = Stop(run.fence, status, step.key, message)
        else:
            status = RunStatus.AMBIGUOUS
            what = "the sidecar that sent it died before an answer came"
            if step.facts.kind is Kind.LOCAL:
                what = "who began it never said what came of it"
            message = ambiguous_message(run.run_id, step, what)
            entry = Stop(run.fence, status, step.key, message, step.exchange if step.state is State.SENT else None)
        outcome = await self._shell.journal.write(entry)
        if isinstance(outcome, Recorded):
            run.refuse(Refusal(status.value, message, run.run_id, step.key))
        elif isinstance(outcome, Fenced | Stopped):
            run.refuse(run.outcome_refusal(outcome))
        else:
            run.outdated = True
        return run.refusal

    async def _differences(self, run: Run, step: Step, request: Request) -> str:
        rule = self._rules.match(request)
        found = difference(await self._sending.first(run, step, request, rule), request, rule)
        return "".join(f"; {one.path}: {one.old!r} → {one.new!r}" for one in found[:5])


async def read_apart(request: Request, work: Callable[[], T]) -> T:
    """Do *work*, which reads *request*'s body: off the event loop when that may take long."""
    if len(request.body) <= _OFF_LOOP and request.header("content-encoding") is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _undone(door: Door, rule: Rule) -> bool:
    """The client reset the connection. SDKs stop reading at a terminal event and close: that undoes nothing."""
    door.look()
    return door.reset and rule.ending is None


def _step_header(step: Step) -> tuple[bytes, bytes]:
    return b"Twiceshy-Step", step.key.encode("latin-1")
