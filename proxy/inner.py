"""The sidecar in an upstream's place: it brings the answers of its own steps (``proxy.own``), each to one exchange."""

import random
import secrets
from collections.abc import AsyncIterator, Callable
from uuid import UUID, uuid4

from proxy import own
from proxy.message import Headers, Request
from proxy.own import Asked
from proxy.owner import Owner
from proxy.upstream import Withheld
from proxy.wakes import Wakes
from runtime import kin
from runtime.entries import Event
from runtime.journal import Journal
from runtime.step import Kind
from runtime.tokens import derived_id

_HEADERS: Headers = ((b"Content-Type", b"application/json"),)


class Given:
    """An answer that is here whole, as ``proxy.incoming`` takes in one of an upstream."""

    status = 200
    reason = b"OK"

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.headers: Headers = (*_HEADERS, (b"Content-Length", b"%d" % len(body)))

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self._body

    def said_all(self) -> None:
        pass

    def close(self) -> None:
        pass


class Inner:
    """Answers one exchange of the step *key*, once."""

    #: A sleep takes as long as it takes.
    limit: float | None = None

    def __init__(self, journal: Journal, wakes: Wakes, asked: Asked, key: str, exchange: UUID, owner: Owner) -> None:
        self.kind: Kind = asked.own.kind
        #: The id of the event that the answer takes.
        self.event: str | None = None
        #: The answer is that nobody decided in time.
        self.timed_out = False
        self._journal = journal
        self._wakes = wakes
        self._asked = asked
        self._key = key
        self._exchange = exchange
        self._owner = owner

    async def send(
        self,
        run: str,
        request: Request,  # noqa: ARG002 - all is known already
        *,
        fresh: bool,  # noqa: ARG002
        last_word: Callable[[], None] | None = None,  # noqa: ARG002
    ) -> Given:
        """The answer, when it is there.

        Raises DatabaseAway for a time that cannot be asked for, and Withheld where no run may be started any more.
        """
        if self.kind is Kind.VALUE:
            return Given(await self._value())
        if self.kind is Kind.START:
            return Given(own.started(await self._start()))
        found = await self._wakes.due(run, self._key, self._exchange)
        if self.kind is Kind.SLEEP:
            return Given(own.slept(found.deadline))
        assert self._asked.own.subject is not None
        self.event = found.came.id if isinstance(found.came, Event) else None
        self.timed_out = self.kind is Kind.APPROVAL and found.came is None
        return Given(own.came(self._asked.own.subject, found.came))

    def over(self) -> None:
        """What came of it is recorded, or never will be."""
        self._wakes.forget(self._exchange)

    async def _start(self) -> str:
        asked, owner = self._asked, self._owner
        assert asked.own.subject is not None
        child = derived_id(owner.uuid, f"child {self._key}")
        against = await kin.start_child(
            self._journal, owner.fence, child, asked.own.subject, asked.input, asked.priority
        )
        if against is not None:
            refusal = owner.outcome_refusal(against)
            owner.refuse(refusal)
            raise Withheld(refusal)
        return child

    async def _value(self) -> bytes:
        match self._asked.own.subject:
            case "now":
                return own.now(await self._journal.now())
            case "random":
                size = self._asked.size
                return own.chance(random.random(), None if size is None else secrets.token_bytes(size))
            case _:
                return own.uuid(str(uuid4()))
