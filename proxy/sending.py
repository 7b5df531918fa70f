"""What goes out for a step: the first time, with the key that is journalled with it; again, what went first."""

from dataclasses import replace

from proxy import keys, mcp, outgoing
from proxy.exchange import Arrival, Send
from proxy.mcp import Call
from proxy.message import Request
from proxy.own import Asked
from proxy.profiles import Rule, Rules
from proxy.run import Run
from proxy.tape import Step
from runtime.entries import StepFacts
from runtime.journal import Journal
from runtime.settings import Settings

_IDENTITY_ENCODING = (b"Accept-Encoding", b"identity")


class Sending:
    """Makes the requests that go out. One per sidecar."""

    def __init__(self, journal: Journal, rules: Rules, settings: Settings, secret: bytes) -> None:
        self._journal = journal
        self._rules = rules
        self._settings = settings
        self._secret = secret

    def step(
        self, run: Run, due: Send, request: Request, rule: Rule, arrival: Arrival, asked: Asked | None
    ) -> tuple[Step, outgoing.Outgoing]:
        """The step that is begun, on the tape if it is new, and what goes out for it."""
        if due.step is not None:
            return due.step, self._outgoing(run, request, rule, due.step.key, due.step.facts.wire_key)[0]
        key = arrival.explicit or f"{arrival.fingerprint.hex()[:24]}#{due.occurrence}"
        sent, wire_key = self._outgoing(run, request, rule, key, None)
        facts = StepFacts(
            key, rule.effect, arrival.explicit is not None, arrival.fingerprint, due.occurrence, arrival.secondary,
            request.method, sent.shown_url, wire_key, sent.journal_head(), request.body, self._rules.hash,
            None if asked is None else asked.own,
        )  # fmt: skip
        return run.tape.add(Step(facts)), sent

    async def first(self, run: Run, step: Step, request: Request, rule: Rule, call: Call | None = None) -> Request:
        """The request that went first for *step*, with the credentials of *request*, and its *call*'s names."""
        body = await self.first_body(run, step)
        first = outgoing.recall(step.facts.request_head, body, request, rule.secret_query)
        return first if call is None else mcp.asked_anew(first, request, call)

    async def first_body(self, run: Run, step: Step) -> bytes:
        if step.state is None:
            return step.facts.request_body
        return await self._journal.request_body(run.run_id, step.key)

    def _outgoing(
        self, run: Run, request: Request, rule: Rule, key: str, pinned: str | None
    ) -> tuple[outgoing.Outgoing, str | None]:
        """The request with its key on the wire. Journal mode puts none."""
        wire_key = None
        if self._settings.mode == "durable":
            choice = keys.choose(request, rule, pinned, keys.derive(self._secret, run.uuid, key))
            request = replace(request, headers=keys.place(request.headers, choice))
            wire_key = choice.value
        if rule.ending is not None:
            # The end of a compressed stream could not be told: SDKs take an uncompressed one as well.
            kept = tuple(pair for pair in request.headers if pair[0].lower() != b"accept-encoding")
            request = replace(request, headers=(*kept, _IDENTITY_ENCODING))
        key_name = None if rule.key is None else rule.key.name
        return outgoing.Outgoing(request, rule.secret_query, key_name), wire_key
