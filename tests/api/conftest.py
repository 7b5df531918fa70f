"""An API in this process, on a database of its own, and a client that has its key."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from runtime.agents import AgentTable
from runtime.api import guard, keys, server
from runtime.api.call import House
from runtime.api.store import Store
from runtime.api.watch import Watch
from runtime.database import Connection, connect
from runtime.settings import Settings

AGENTS = {
    "a": AgentTable(command=["true"]),
    "refund": AgentTable(
        command=["true"],
        input_schema={"type": "object", "required": ["order"], "properties": {"order": {"type": "string"}}},
    ),
}


@dataclass
class Api:
    """The API, and a client of it."""

    house: House
    url: str
    key: str
    session: aiohttp.ClientSession
    #: Every status that was answered: no test may leave a 500 behind unseen.
    statuses: list[int] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return self.house.settings

    async def ask(self, method: str, path: str, content: Any = None, **more: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        if content is not None:
            more["json"] = content
        headers = {"Authorization": f"Bearer {self.key}"} | more.pop("headers", {})
        async with self.session.request(method, self.url + path, headers=headers, **more) as answer:
            self.statuses.append(answer.status)
            text = await answer.text()
            if answer.status >= 400:
                assert answer.content_type == "application/problem+json", text
            return answer.status, await answer.json(content_type=None) if text else None

    async def get(self, path: str, **more: Any) -> Any:
        """JSON of a 200."""
        status, content = await self.ask("GET", path, **more)
        assert status == 200, content
        return content

    async def post(self, path: str, content: Any = None, **more: Any) -> Any:
        """JSON of a 200 or 201."""
        status, found = await self.ask("POST", path, content, **more)
        assert status in (200, 201), found
        return found


@pytest.fixture
def settings() -> Settings:
    return Settings(poll=0.05, database_wait=5.0)


@asynccontextmanager
async def served(
    dsn: str, settings: Settings, folder: Path, agents: Mapping[str, AgentTable]
) -> AsyncIterator[tuple[House, str, str]]:
    """An API, its address and its key."""
    store = await Store.open(dsn, settings)
    house = House(
        settings, lambda: agents, store, Watch(store, settings.poll), lambda _head, _body: None,
        guard.own_names("127.0.0.1", settings.api_hosts),
    )  # fmt: skip
    runner = web.AppRunner(server.application(house), access_log=None, shutdown_timeout=1.0, **server.LIMITS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with store.connection() as connection:
        key = await keys.of_folder(connection, folder)
    yield house, f"http://127.0.0.1:{runner.addresses[0][1]}", key
    house.ending.set()
    await house.watch.end()
    await runner.cleanup()
    await store.close()


@pytest.fixture
async def api(dsn: str, settings: Settings, tmp_path: Path) -> AsyncIterator[Api]:
    async with served(dsn, settings, tmp_path, AGENTS) as (house, url, key), aiohttp.ClientSession() as session:
        made = Api(house, url, key, session)
        yield made
    assert 500 not in made.statuses


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    connection = await connect(dsn, name="test")
    yield connection
    await connection.close()
