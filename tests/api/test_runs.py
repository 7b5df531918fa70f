"""Runs over HTTP: started, listed, shown, waited for, steered."""

import asyncio
import json
import threading
from typing import Any

import pytest

from runtime import runs
from runtime.api import of_runs
from runtime.database import Connection
from runtime.tokens import hash_token
from tests.api.conftest import Api


async def start(api: Api, **given: Any) -> str:
    run: str = (await api.post("/v1/runs", {"agent": "a"} | given))["id"]
    return run


async def claim(conn: Connection, run: str) -> runs.Claim:
    return await runs.claim(conn, run, kind="worker", host="here", folder="/state", lease=30.0, process="w")


async def end(conn: Connection, run: str, outcome: str, result: bytes | None = None, **more: Any) -> None:
    claimed = await claim(conn, run)
    if result is not None:
        await runs.put_result(conn, run, hash_token(claimed.token), result)
    await runs.end_attempt(conn, run, hash_token(claimed.token), outcome, 0, **more)


async def test_an_input_that_takes_long_to_check_holds_up_nobody(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered = threading.Event(), threading.Event()

    def check(*_: object) -> None:
        begun.set()
        assert answered.wait(20)

    monkeypatch.setattr(of_runs, "check_input", check)
    starting = asyncio.create_task(api.ask("POST", "/v1/runs", {"agent": "a"}))
    assert await asyncio.to_thread(begun.wait, 20)
    await api.get("/healthz")
    answered.set()
    assert (await starting)[0] == 201


async def test_a_run_is_started_and_shown_as_it_was_asked_for(api: Api) -> None:
    given = '{"n": 1.10, "x": "\\u0000"}'
    text = f'{{"agent": "a", "run": "r-1", "priority": 7, "attributes": {{"team": "ops"}}, "input": {given}}}'
    status, run = await api.ask("POST", "/v1/runs", data=text, headers={"Content-Type": "application/json"})
    assert status == 201
    assert run == await api.get("/v1/runs/r-1")
    assert (run["status"], run["priority"], run["attributes"], run["attempts"]) == ("queued", 7, {"team": "ops"}, 0)
    assert run["input"] == {"n": 1.1, "x": "\x00"}
    assert [run[name] for name in ("result", "error", "stop", "parked", "parent", "continued_as")] == [None] * 6
    async with api.session.get(f"{api.url}/v1/runs/r-1", headers={"Authorization": f"Bearer {api.key}"}) as answer:
        assert given in await answer.text(), "an input is kept as it was written"


async def test_a_start_under_a_key_happens_once(api: Api) -> None:
    key = {"Idempotency-Key": "k-1"}
    status, first = await api.ask("POST", "/v1/runs", {"agent": "a", "input": 1}, headers=key)
    assert status == 201
    status, again = await api.ask("POST", "/v1/runs", {"agent": "a", "input": 1}, headers=key)
    assert (status, again["id"]) == (200, first["id"])
    for other in ({"agent": "a", "input": 2}, {"agent": "a", "input": 1, "attributes": {"x": "y"}}):
        status, problem = await api.ask("POST", "/v1/runs", other, headers=key)
        assert status == 409
        assert "k-1" in problem["detail"]
    assert len((await api.get("/v1/runs"))["runs"]) == 1


async def test_bad_input_is_refused_at_the_start(api: Api) -> None:
    status, problem = await api.ask("POST", "/v1/runs", {"agent": "refund", "input": {"order": 5}})
    assert status == 422
    assert "$.order" in problem["detail"]
    status, problem = await api.ask("POST", "/v1/runs", {"agent": "nobody"})
    assert status == 404
    assert "refund" in problem["detail"]
    assert (await api.get("/v1/runs"))["runs"] == []
    assert [each["name"] for each in (await api.get("/v1/agents"))["agents"]] == ["a", "refund"]


async def test_lists_are_filtered(api: Api, conn: Connection) -> None:
    one = await start(api, attributes={"team": "ops", "env": "prod"})
    two = await start(api, attributes={"team": "ops", "env": "test"})
    three = await start(api, agent="refund", input={"order": "1"})
    await end(conn, two, "done")

    async def listed(query: str) -> list[str]:
        return [run["id"] for run in (await api.get(f"/v1/runs?{query}"))["runs"]]

    assert await listed("") == [three, two, one]
    assert await listed("agent=refund") == [three]
    assert await listed("status=done") == [two]
    assert await listed("attribute=team:ops") == [two, one]
    assert await listed("attribute=team:ops&attribute=env:prod") == [one]
    assert await listed("attribute=team:ops&status=queued") == [one]
    assert await listed("attribute=team:nobody") == []
    assert await listed("attribute=team:ops&attribute=team:dev") == []
    at = (await api.get(f"/v1/runs/{two}"))["created_at"].replace("+", "%2B")
    assert await listed(f"created_after={at}") == [three, two]
    assert await listed(f"created_before={at}") == [one]
    assert await listed(f"attribute=team:ops&created_before={at}") == [one]
    for bad in ("status=odd", "agent=a%2Fb", "attribute=x", "created_after=today", "limit=0", "limit=201", "x=1",
                "limit=1&limit=2", "cursor=!"):  # fmt: skip
        assert (await api.ask("GET", f"/v1/runs?{bad}"))[0] == 422, bad


@pytest.mark.parametrize("query", ["", "attribute=of:many", "status=queued", "agent=a"])
async def test_pages_do_not_shift_when_runs_are_added(api: Api, query: str) -> None:
    started = [await start(api, run=f"r-{n}", attributes={"of": "many"}) for n in range(7)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = await api.get(f"/v1/runs?{query}&limit=2{cursor}")
        seen += [run["id"] for run in page["runs"]]
        assert "input" not in page["runs"][0]
        await start(api, attributes={"of": "many"})
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == started[::-1]


async def test_a_result_is_waited_for(api: Api, conn: Connection) -> None:
    run = await start(api)
    status, found = await api.ask("GET", f"/v1/runs/{run}/result")
    assert (status, found["status"]) == (202, "queued")
    waiting = asyncio.create_task(api.ask("GET", f"/v1/runs/{run}/result?timeout=30"))
    await asyncio.sleep(0)
    await end(conn, run, "done", b'{"ok": true}')
    assert await waiting == (200, {"run": run, "status": "done", "result": {"ok": True}, "error": None})
    failed = await start(api)
    await end(conn, failed, "failed", final=True, error="exit code 3")
    status, found = await api.ask("GET", f"/v1/runs/{failed}/result?timeout=30")
    assert (status, found["status"], found["error"]) == (200, "failed", "exit code 3")


async def test_events_are_sent_once_and_listed(api: Api) -> None:
    run = await start(api)
    path = f"/v1/runs/{run}/events"
    assert await api.ask("POST", path, {"name": "go", "id": "e1", "payload": {"by": "ann"}}) == (
        201, {"name": "go", "id": "e1", "fresh": True},
    )  # fmt: skip
    assert (await api.ask("POST", path, {"name": "go", "id": "e1", "payload": {"by": "ann"}}))[0] == 200
    assert (await api.ask("POST", path, {"name": "go", "id": "e1", "payload": 2}))[0] == 409
    for n in range(2, 5):
        await api.post(path, {"name": "go", "id": f"e{n}"})
    page = await api.get(f"{path}?limit=3")
    assert [(each["id"], each["payload"]) for each in page["events"]] == [
        ("e1", {"by": "ann"}),
        ("e2", None),
        ("e3", None),
    ]
    assert [each["id"] for each in (await api.get(f"{path}?limit=3&cursor={page['next']}"))["events"]] == ["e4"]


async def test_a_run_is_cancelled_and_retried(api: Api, conn: Connection) -> None:
    run = await start(api)
    assert await api.post(f"/v1/runs/{run}/cancel") == {"run": run, "status": "cancelled", "was": "queued"}
    assert (await api.post(f"/v1/runs/{run}/cancel", {}))["was"] == "cancelled"
    assert (await api.post(f"/v1/runs/{run}/retry"))["status"] == "queued"
    await end(conn, run, "done")
    for verb in ("cancel", "retry"):
        status, problem = await api.ask("POST", f"/v1/runs/{run}/{verb}")
        assert status == 409
        assert run in problem["detail"]
    assert (await api.ask("POST", f"/v1/runs/{run}/cancel", {"x": 1}))[0] == 422


async def test_a_run_is_claimed_once(api: Api, conn: Connection) -> None:
    run = await start(api)
    claimed = await api.post(f"/v1/runs/{run}/claim")
    assert (claimed["run"], claimed["attempt"]) == (run, 1)
    assert await runs.put_result(conn, run, hash_token(claimed["token"]), b"1")
    async with api.session.post(
        f"{api.url}/v1/runs/{run}/claim", headers={"Authorization": f"Bearer {api.key}"}
    ) as answer:
        assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (409, True)
    assert (await api.ask("POST", "/v1/runs/nobody/claim"))[0] == 404


async def test_what_is_not_there_is_a_problem(api: Api) -> None:
    for method, path, status in (
        ("GET", "/v1/runs/nobody", 404), ("GET", "/v1/runs/nobody/result", 404), ("GET", "/v1/nothing", 404),
        ("POST", "/v1/runs/nobody/cancel", 404), ("GET", "/v1/runs/nobody/events", 404), ("PUT", "/v1/runs", 405),
        ("DELETE", "/v1/runs/x", 405), ("GET", "/v1/runs/a%2Fb", 422), ("GET", "/v1/runs/a%00b", 422),
    ):  # fmt: skip
        found, problem = await api.ask(method, path)
        assert (found, problem["status"]) == (status, status), path
        assert json.dumps(problem["detail"]) != '""'
