"""Scenarios: one run, its agent and its sidecar, told in a few lines."""

from dataclasses import dataclass, field, replace

from proxy.exchange import Arrival, Decision, Mode
from runtime.step import Effect, RunStatus
from tests.core.sidecars import Client, Sidecar, Stage
from tests.core.world import Fault, Journal, Upstream, name_of, print_of


def arrival(
    name: str,
    effect: Effect = Effect.IDEMPOTENT,
    *,
    explicit: str | None = None,
    asker: str = "",
    again: bool = False,
    token: str | None = None,
    token_is_call: bool = False,
    tokenless: bool = False,
    retention: float = 86400.0,
    signed: bool = False,
) -> Arrival:
    """A request called *name*; *asker*: what its other headers say."""
    return Arrival(
        effect, print_of(name), print_of(asker)[:16], explicit, again, token.encode() if token else None,
        token_is_call, tokenless=tokenless, retention=retention, signed=signed,
    )  # fmt: skip


READ = arrival("status", Effect.READ)
LLM = arrival("llm", Effect.REPEATABLE)
REFUND = arrival("refund", Effect.IDEMPOTENT)
MAIL = arrival("mail", Effect.AT_MOST_ONCE)


def name(asked: Arrival) -> str:
    return name_of(asked.fingerprint)


def beaten(asked: Arrival) -> Arrival:
    """The same request after one beat."""
    return replace(asked, beaten=True)


@dataclass
class Scene:
    """One run, told as a scenario: an agent, the sidecar that it speaks through, and what surrounds them."""

    mode: Mode = "durable"
    journal: Journal = field(default_factory=Journal)
    upstream: Upstream = field(default_factory=Upstream)
    sidecar: Sidecar = field(init=False)
    clients: list[Client] = field(default_factory=list)
    sidecars: int = 0

    def __post_init__(self) -> None:
        self.another_sidecar()
        self.sidecar.take(self.journal.claim(self.sidecar.id))

    def another_sidecar(self) -> None:
        self.sidecars += 1
        self.sidecar = Sidecar(f"sidecar {self.sidecars}", self.journal, self.upstream, self.mode)

    def restart(self, after: str = "died") -> None:
        """The agent ended, and starts again from the top."""
        for client in self.clients:
            client.hang_up()
        self.clients.clear()
        self.journal.end_attempt(after)
        if self.journal.status is RunStatus.QUEUED:
            self.sidecar.take(self.journal.claim(self.sidecar.id))

    def crash(self) -> None:
        """The sidecar is killed, and its agent with it; both start again."""
        self.journal.dead.add(self.sidecar.id)
        self.sidecar.die()
        self.another_sidecar()
        self.restart("handed_over")

    def decide(self, asked: Arrival) -> Decision:
        return self.sidecar.decide(asked)

    def ask(self, asked: Arrival, body: bytes = b"") -> Client:
        """The agent asks for something that is served."""
        client = self.sidecar.ask(asked, body)
        assert isinstance(client, Client), client
        self.clients.append(client)
        return client

    def finish(self, client: Client, *faults: Fault) -> tuple[int, bytes]:
        """Move what serves *client* to its end, sendings meeting *faults* in their order; status and body."""
        left = list(faults)
        while client.exchange is not None and client.exchange.stage is not Stage.OVER:
            sends = client.exchange.stage is Stage.INTENDED
            client.exchange.advance(left.pop(0) if sends and left else Fault.NONE)
        assert not left
        facts = client.deliver().facts
        assert facts.body is not None
        return facts.status, facts.body

    def call(self, asked: Arrival, *faults: Fault, body: bytes = b"") -> tuple[int, bytes]:
        """The agent asks and has its answer."""
        return self.finish(self.ask(asked, body), *faults)

    def stopped(self, asked: Arrival) -> bool:
        """The agent asks, and the run stops as ambiguous."""
        return self.sidecar.ask(asked) is RunStatus.AMBIGUOUS


def until(client: Client, stage: Stage, fault: Fault = Fault.NONE) -> None:
    """Move what serves *client* up to *stage*."""
    assert client.exchange is not None
    while client.exchange.stage is not stage:
        client.exchange.advance(fault)
