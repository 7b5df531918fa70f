"""The verbs of the command line: what the API does, and JSON where a program asks."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy import cli
from runtime import runs
from runtime.database import connect
from runtime.entries import Own
from runtime.folder import state_folder
from runtime.step import Kind
from runtime.tokens import hash_token
from tests.api.processes import AGENTS
from tests.database.samples import claim, opened, register


class Twiceshy:
    """Calls verbs in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        found = cli.main(words)
        said = self._capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out if code == 0 else said.err

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def twiceshy(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Twiceshy:
    (tmp_path / "settings.json").write_text(json.dumps({"agents": AGENTS}))
    for name, value in {
        "DATABASE_URL": dsn, "TWICESHY_CONFIG": str(tmp_path / "settings.json"), "TWICESHY_HOME": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return Twiceshy(capsys)


def test_each_verb_speaks_json(twiceshy: Twiceshy, dsn: str) -> None:
    asked = ("start", "a", "--run", "r-1", "--input", '{"n": 1}', "--attribute", "team:ops")
    assert twiceshy.json(*asked) == {"run": "r-1", "agent": "a", "status": "queued"}
    twiceshy("start", "a", "--run", "r-2")
    assert [each["run"] for each in twiceshy.json("runs")] == ["r-2", "r-1"]
    [listed] = twiceshy.json("runs", "--attribute", "team:ops")
    assert (listed["run"], listed["attributes"]) == ("r-1", {"team": "ops"})
    assert "attribute" in twiceshy("runs", "--attribute", "x", code=2)
    sent = twiceshy.json("event", "r-1", "go", "--id", "e1", "--payload", '{"by": "ann"}')
    assert sent == {"run": "r-1", "name": "go", "id": "e1", "fresh": True}
    assert "was sent before" in twiceshy("event", "r-1", "go", "--id", "e1", "--payload", '{"by": "ann"}')

    async def do_it() -> None:
        conn = await connect(dsn, name="test")
        claimed = await runs.claim(conn, "r-1", kind="worker", host="h", folder="f", lease=30.0, process="w")
        await runs.put_result(conn, "r-1", hash_token(claimed.token), b'{"sum": 5, "text": "\\u001b[2J"}')
        await runs.end_attempt(conn, "r-1", hash_token(claimed.token), "done", 0)
        await conn.close()

    asyncio.run(do_it())
    shown = twiceshy.json("show", "r-1")
    assert (shown["input"], shown["result"]["sum"], shown["status"]) == ({"n": 1}, 5, "done")
    assert 'result: {"sum": 5, "text": "\\u001b[2J"}' in twiceshy("show", "r-1")
    assert twiceshy.json("cancel", "r-2")["was"] == "queued"
    assert twiceshy.json("retry", "r-2")["status"] == "queued"


def test_approvals_and_an_ambiguous_step(twiceshy: Twiceshy, dsn: str) -> None:
    async def ask() -> str:
        async with opened(dsn) as journal:
            await register(journal)
            scene = await claim(journal)
            await scene.begin("w1", own=Own(Kind.APPROVAL, "manager"), request_body=b'{"request": {"sum": 5}}')
            await scene.write(scene.stop(await scene.begin("k"), "k"))
            return scene.run_id

    run = asyncio.run(ask())
    [waiting] = twiceshy.json("approvals")
    assert (waiting["run"], waiting["id"], waiting["name"], waiting["request"]) == (run, "w1", "manager", {"sum": 5})
    assert f"{run} manager (w1)" in twiceshy("approvals", "--run", run)
    decided = twiceshy.json("approve", run, "manager", "--by", "ann", "--comment", "fine")
    assert (decided["id"], decided["decision"], decided["by"], decided["comment"]) == ("w1", "approve", "ann", "fine")
    assert "approve, by ann" in twiceshy("decline", run, "w1", code=1)
    assert twiceshy("approvals") == "nothing waits for a decision\n"
    resolved = twiceshy.json("resolve", run, "k", "assume_done", "--body", "{}")
    assert resolved == {"run": run, "step": "k", "how": "assume_done", "status": "queued"}


def test_how_to_reach_the_api_is_told(twiceshy: Twiceshy, tmp_path: Path) -> None:
    assert "no API" in twiceshy("api", "--show", code=1)
    folder = state_folder(os.environ["DATABASE_URL"])
    (folder / "api.key").write_text("ts-key\n")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (folder / "api.address").write_text(f"{address}\n")
        threading.Thread(target=listener.accept, daemon=True).start()
        told = twiceshy("api", "--show")
    assert told.splitlines() == [f"export TWICESHY_API={address}", "export TWICESHY_API_KEY=ts-key"]
