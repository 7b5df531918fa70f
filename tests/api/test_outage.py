"""The database away, and what an agent may not do by its proxy."""

import asyncio
from pathlib import Path

import pytest

from runtime.api.store import Store
from runtime.database import Connection
from runtime.folder import hold_port
from runtime.settings import Settings
from tests.api.conftest import Api
from tests.stack import stack


async def test_without_the_database_it_says_so_and_goes_on_when_it_is_back(api: Api, conn: Connection) -> None:
    run = (await api.post("/v1/runs", {"agent": "a"}))["id"]
    there = api.house.store
    api.house.store = await Store.open("postgresql://127.0.0.1:1/nowhere", Settings(database_wait=0.5))
    for path in ("/healthz", "/v1/runs", f"/v1/runs/{run}/result"):
        async with api.session.get(api.url + path, headers={"Authorization": f"Bearer {api.key}"}) as answer:
            assert (answer.status, answer.content_type) == (503, "application/problem+json")
            assert answer.headers["Retry-After"]
    await api.house.store.close()
    api.house.store = there
    assert (await api.get("/healthz")) == {"status": "ok"}


async def test_a_server_that_was_started_again_is_asked_anew(api: Api, conn: Connection) -> None:
    run = (await api.post("/v1/runs", {"agent": "a"}))["id"]
    waiting = asyncio.create_task(api.ask("GET", f"/v1/runs/{run}/result?timeout=30"))
    await api.get(f"/v1/runs/{run}")
    await conn.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1",
        conn.get_server_pid(),
    )
    async with asyncio.timeout(30):
        while (await api.ask("GET", f"/v1/runs/{run}"))[0] != 200:
            pass
    await api.post(f"/v1/runs/{run}/cancel")
    status, found = await waiting
    assert (status, found["status"]) == (200, "cancelled"), "who waits is not thrown out by an outage"


@pytest.mark.check_all
def test_no_agent_reaches_the_api_by_its_proxy(dsn: str, tmp_path: Path, run: str) -> None:
    (tmp_path / "state" / "api").mkdir(parents=True)
    with hold_port(0) as held:
        port = held.getsockname()[1]
        (tmp_path / "state" / "api" / "port").write_text(f"{port}\n")
        with stack(dsn, tmp_path) as made:
            for host in ("127.0.0.1", "localhost"):
                reply = made.claim(run).ask("POST", f"http://{host}:{port}/v1/runs", b"{}")
                assert (reply.status, reply.error) == (403, "denied")
