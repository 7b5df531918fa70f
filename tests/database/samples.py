"""Values that the database tests write, and a connection that can be cut at the worst moment."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

from runtime import runs
from runtime.entries import Answer, AnswerFacts, Begun, Fence, Intent, Outcome, Read, Recorded, StepFacts, Stop
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect, Finality, RunStatus, State

SIDECAR = "sidecar-1"
SETTINGS = Settings(database_wait=5.0, drain=1.0)


def facts(key: str = "k", effect: Effect = Effect.AT_MOST_ONCE, **other: Any) -> StepFacts:
    """A step named *key*."""
    given: dict[str, Any] = {
        "key": key,
        "effect": effect,
        "explicit": False,
        "fingerprint": hashlib.sha256(key.encode()).digest(),
        "occurrence": 1,
        "secondary": bytes(16),
        "method": "POST",
        "url": "http://127.0.0.1:9000/v1/things",
        "wire_key": "a-key",
        "request_head": b'{"method":"POST"}',
        "request_body": b'{"amount": 50}',
        "rules": b"rules",
    }
    return StepFacts(**given | other)


def answer(
    body: bytes | None = b"done", finality: Finality = Finality.FINAL, status: int = 200, **other: Any
) -> AnswerFacts:
    """An upstream's answer."""
    given: dict[str, Any] = {
        "status": status,
        "reason": b"OK",
        "headers": ((b"Content-Type", b"text/plain"), (b"X-Odd", b" caf\xe9: \x00 ")),
        "body": body,
        "body_id": None,
        "size": len(body or b""),
        "whole": True,
        "finality": finality,
        "own": False,
        "tokens": 7,
    }
    return AnswerFacts(**given | other)


PROVISIONAL = answer(b"later", Finality.PROVISIONAL, 503)
DOUBTFUL = answer(b"hm", Finality.DOUBTFUL, 500)


class Scene:
    """One run, its current attempt, and a journal to write with."""

    def __init__(self, journal: Journal, run_id: str, fence: Fence, n: int) -> None:
        self.journal = journal
        self.run_id = run_id
        self.fence = fence
        self.n = n

    async def write(self, entry: Any) -> Outcome:
        return await self.journal.write(entry)

    def intent(self, key: str = "k", effect: Effect = Effect.AT_MOST_ONCE, place: int = 0, **other: Any) -> Intent:
        replaces: UUID | None = other.pop("replaces", None)
        return Intent(self.fence, facts(key, effect, **other), uuid4(), place, replaces)

    async def begin(self, key: str = "k", effect: Effect = Effect.AT_MOST_ONCE, place: int = 0, **other: Any) -> UUID:
        """An intent that is committed; its exchange."""
        intent = self.intent(key, effect, place, **other)
        outcome = await self.write(intent)
        assert isinstance(outcome, Begun), outcome
        return intent.exchange

    def answer(
        self, exchange: UUID, facts: AnswerFacts | None = None, key: str = "k", state: State = State.ANSWERED
    ) -> Answer:
        return Answer(self.run_id, key, exchange, self.n, facts or answer(), state)

    async def record(self, exchange: UUID, facts: AnswerFacts | None = None, key: str = "k") -> Recorded:
        """An answer that is committed."""
        outcome = await self.write(self.answer(exchange, facts, key))
        assert isinstance(outcome, Recorded), outcome
        return outcome

    async def step(
        self, key: str = "k", effect: Effect = Effect.AT_MOST_ONCE, facts: AnswerFacts | None = None
    ) -> UUID:
        """A step begun and answered."""
        exchange = await self.begin(key, effect)
        await self.record(exchange, facts, key)
        return exchange

    def stop(self, exchange: UUID | None = None, key: str = "k", message: str = "nobody knows") -> Stop:
        return Stop(self.fence, RunStatus.AMBIGUOUS, key, message, exchange, evidence="the connection was lost")

    def read(
        self, facts_: AnswerFacts | None = None, key: str = "r", place: int = 0, exchange: UUID | None = None
    ) -> Read:
        step = facts(key, Effect.READ, method="GET", wire_key=None)
        return Read(self.fence, step, exchange or uuid4(), facts_ or answer(), place, self.n)

    async def call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A verb of ``runtime.runs`` on this run."""
        async with self.journal.connection() as connection:
            return await verb(connection, self.run_id, *args, **kwargs)

    async def end(
        self, outcome: str, exit_code: int | None = 1, *, final: bool = False, error: str | None = None
    ) -> Any:
        return await self.call(runs.end_attempt, self.fence.token_hash, outcome, exit_code, final=final, error=error)

    async def again(self, sidecar: str = SIDECAR, journal: Journal | None = None) -> "Scene":
        """The next attempt, on *sidecar*."""
        return await claim(journal or self.journal, self.run_id, sidecar=sidecar)

    async def state(self, key: str = "k") -> State | None:
        steps = await self.call(runs.steps)
        return next((step.state for step in steps if step.key == key), None)

    async def status(self) -> RunStatus:
        status = (await self.call(runs.get_run)).status
        assert isinstance(status, RunStatus)
        return status

    async def statuses(self, key: str = "k") -> list[int]:
        """Of the answers of a step, in order."""
        rows = await self.journal.load(self.run_id)
        assert rows is not None
        return [a.facts.status for step in rows.steps if step.facts.key == key for a in step.answers]


async def claim(journal: Journal, run_id: str | None = None, *, sidecar: str = SIDECAR, lease: float = 30.0) -> Scene:
    """A run (a new one when not named) and its next attempt; the one before is proved dead."""
    async with journal.connection() as connection:
        run_id = await runs.create(connection, run_id)
        claimed = await runs.claim(
            connection, run_id, kind="launcher", host="here", folder="/state", lease=lease, proved_dead=True
        )
    return Scene(journal, run_id, Fence(run_id, runs.hash_token(claimed.token), sidecar), claimed.n)


async def register(journal: Journal, sidecar: str = SIDECAR, *, folder: str = "/state", lease: float = 30.0) -> bytes:
    return await journal.register(
        sidecar=sidecar, host="here", folder=folder, pid=1, address="127.0.0.1:1", lease=lease
    )


@asynccontextmanager
async def opened(dsn: str, settings: Settings = SETTINGS) -> AsyncIterator[Journal]:
    journal = await Journal.open(dsn, settings)
    try:
        yield journal
    finally:
        await journal.close()


class Wire:
    """A TCP relay before Postgres that loses replies, swallows everything, or refuses connections."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 5432)
        self._parts = parts
        self._links: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.dsn = ""
        self.connections = 0
        self.refusing = False
        self.silent = False  # bytes of the client are swallowed
        self.lose: Callable[[bytes], bool] | None = (
            None  # the reply to a message like this is lost, with the connection
        )
        self.lost = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        host = self._parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(self._parts._replace(netloc=f"{host}@127.0.0.1:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)

    def cut(self) -> None:
        """Every connection ends at once."""
        for link in self._links:
            link.cancel()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        self.connections += 1
        try:
            if not self.refusing:
                await self._relay(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            writer.transport.abort()
            self._links.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        losing = asyncio.Event()

        async def forth() -> None:
            while data := await reader.read(1 << 16):
                if self.lose is not None and self.lose(data):
                    self.lose = None
                    losing.set()
                if not self.silent:
                    far_writer.write(data)

        async def back() -> None:
            while data := await far_reader.read(1 << 16):
                if losing.is_set():
                    # Postgres has answered, so it has committed.
                    self.lost.set()
                    return
                writer.write(data)

        ways = [asyncio.create_task(forth()), asyncio.create_task(back())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()
