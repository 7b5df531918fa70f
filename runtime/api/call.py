"""What a handler works with: one request, and the house of its API process."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from aiohttp import web

from runtime.agents import AgentTable
from runtime.api.store import Store
from runtime.api.watch import Watch
from runtime.database import Connection
from runtime.settings import Settings
from runtime.settling import Assume


@dataclass(slots=True)
class House:
    """What all requests share. ``agents``: those that are declared at this moment."""

    settings: Settings
    agents: Callable[[], Mapping[str, AgentTable]]
    store: Store
    watch: Watch
    assume: Assume
    #: By which the API may be called.
    names: frozenset[str]
    #: The OpenAPI document.
    document: bytes = b""
    tails: int = 0
    #: Set when the process is to end: whoever waits is answered.
    ending: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked and understood."""

    house: House
    http: web.Request
    #: Of the body's members, the text, as it was written.
    raw: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The limits."""
        return self.house.settings

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection, for a few statements."""
        return self.house.store.connection()
