"""API processes as they are really started: two on one database, and one that the keeper keeps."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.api import keys
from runtime.database import Connection
from runtime.keeping import Keeping
from runtime.settings import Settings
from tests.api.processes import ROOT, Process, started
from tests.kill.processes import STANDIN, everything_ended


async def start(session: aiohttp.ClientSession, process: Process, key: str, given: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {process.key}", "Idempotency-Key": key}
    async with session.post(f"{process.url}/v1/runs", json=given, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


@pytest.mark.check_all
async def test_fifty_starts_at_the_same_instant_through_two_processes_are_one_run(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    with started(dsn, tmp_path / "one") as one, started(dsn, tmp_path / "two") as two:
        assert one.key != two.key
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for key in ("first", "second"):
                given = {"agent": "a", "input": {"of": key}}
                answers = await asyncio.gather(
                    *(start(session, process, key, given) for _ in range(25) for process in (one, two))
                )
                assert sorted(status for status, _ in answers) == [200] * 49 + [201]
                assert len({run["id"] for _, run in answers}) == 1
                assert (await start(session, two, key, {"agent": "a", "input": {"of": "else"}}))[0] == 409
            # Each takes the other's key: both are the database's.
            async with session.get(f"{one.url}/v1/runs", headers={"Authorization": f"Bearer {two.key}"}) as answer:
                assert len((await answer.json())["runs"]) == 2
    assert await conn.fetchval("SELECT count(*) FROM twiceshy.run") == 2


@pytest.mark.check_all
async def test_the_keeper_keeps_an_api_on_its_port(home: Path) -> None:
    """It is started again when it dies, knows the agents of all who use the folder, and ends with the keeper."""
    command = [sys.executable, "-m", "proxy.api"]
    tables = [{"command": ["true"]}, {"command": ["false"]}]
    one, two = (Settings.model_validate({"agents": {f"agent-{n}": table}}) for n, table in enumerate(tables))
    async with await Keeping.open(one, STANDIN, command), await Keeping.open(two, STANDIN, command):
        address = await found(home)
        key = keys.read(keys.key_file(home)) or ""
        assert await agents(address, key) == ["agent-0", "agent-1"]
        assert address.endswith(":" + (home / "api" / "port").read_text().strip())
        os.kill(int((home / "api.lock").read_text()), signal.SIGKILL)
        assert await agents(address, key) == ["agent-0", "agent-1"]
        assert await found(home) == address
    await everything_ended(home)
    assert keys.read(keys.address_file(home)) is None, "who ends in order takes its address with it"


@pytest.mark.check_all
def test_a_port_that_is_taken_is_told_before_anything_is_started(home: Path, dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, flag in ((["up", "--port", "0", "--api-port", port], "--api-port"), (["api", "--port", port], port)):
            run = subprocess.run(
                [sys.executable, "-m", "proxy.cli", *words], cwd=ROOT, env=os.environ | {"DATABASE_URL": dsn},
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert (run.returncode, flag in run.stderr) == (2, True), run.stderr


async def found(home: Path) -> str:
    async with asyncio.timeout(60):
        while (address := keys.read(keys.address_file(home))) is None:
            await asyncio.sleep(0.05)
    return address


async def agents(address: str, key: str) -> list[str]:
    async with asyncio.timeout(60), aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        while True:
            try:
                async with session.get(f"{address}/v1/agents") as answer:
                    return [agent["name"] for agent in json.loads(await answer.text())["agents"]]
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
