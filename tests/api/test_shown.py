"""What is seen of a run: journal, timeline, attempts, tail, and sums over all runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest

from runtime.entries import Own
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect, Kind
from tests.api.conftest import Api
from tests.database.samples import Scene, answer, claim, opened, register


@pytest.fixture
def settings() -> Settings:
    return Settings(poll=0.05, database_wait=5.0, api_tails=2, token_price=3.0)


@pytest.fixture
async def journal(dsn: str) -> AsyncIterator[Journal]:
    async with opened(dsn) as journal:
        await register(journal)
        yield journal


@pytest.fixture
async def scene(journal: Journal) -> Scene:
    return await claim(journal)


SECRET = answer(
    b'{"access_token": "t0p", "id": 7, "max_tokens": 5}',
    headers=((b"Set-Cookie", b"sid=t0p"), (b"X-Api-Key", b"t0p"), (b"Content-Type", b"application/json")),
)


async def test_the_journal_is_shown_without_credentials_and_in_pages(api: Api, scene: Scene) -> None:
    await scene.step("one", facts=SECRET)
    await scene.step("two", Effect.REPEATABLE)
    await scene.begin("three")
    path = f"/v1/runs/{scene.run_id}/journal"
    page = await api.get(f"{path}?limit=2")
    rest = await api.get(f"{path}?limit=2&cursor={page['next']}")
    assert [(step["n"], step["key"], step["state"]) for step in page["steps"] + rest["steps"]] == [
        (1, "one", "answered"), (2, "two", "answered"), (3, "three", "sent"),
    ]  # fmt: skip
    assert rest["next"] is None
    [found] = page["steps"][0]["answers"]
    assert "t0p" not in json.dumps(found)
    assert json.loads(found["body"]) == {"access_token": "…", "id": 7, "max_tokens": 5}
    assert found["headers"] == [["Set-Cookie", "…"], ["X-Api-Key", "…"], ["Content-Type", "application/json"]]
    assert (await api.ask("GET", "/v1/runs/nobody/journal"))[0] == 404
    assert (await api.ask("GET", f"{path}?cursor=x"))[0] == 422


async def test_attempts_and_timeline(api: Api, scene: Scene) -> None:
    await scene.step("one")
    tape = {
        "live": 1,
        "calls_saved": 2,
        "tokens_saved": 500_000,
        "replayed": 3,
        "steps": [["one", "live"]],
        "hints": ["odd"],
    }
    await scene.journal.save_tape(scene.run_id, 1, json.dumps(tape).encode())
    await scene.end("died")
    await scene.again()
    found = (await api.get(f"/v1/runs/{scene.run_id}/attempts"))["attempts"]
    assert [(each["n"], each["outcome"], each["replayed"]) for each in found] == [(1, "died", 3), (2, None, 0)]
    assert found[0]["hints"] == ["odd"]
    timeline = await api.get(f"/v1/runs/{scene.run_id}/timeline")
    assert timeline["attempts"][0]["steps"] == {"one": "live"}
    sums = await api.get("/v1/stats")
    names = ("attempts", "recoveries", "replayed", "llm_calls", "tokens", "llm_calls_saved")
    assert [sums[name] for name in names] == [2, 1, 3, 1, 7, 2]
    assert (sums["runs"], sums["money_saved"]) == ({"running": 1}, 1.5)
    assert (await api.get("/v1/stats?since=2100-01-01T00:00:00Z"))["attempts"] == 0


class Tail:
    """A client of a tail."""

    def __init__(self, api: Api, run: str, last: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api.key}"} | ({} if last is None else {"Last-Event-ID": last})
        self._asked = api.session.get(f"{api.url}/v1/runs/{run}/tail", headers=headers)

    async def __aenter__(self) -> Self:
        self.answer = await self._asked.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.answer.close()

    async def next(self) -> dict[str, Any]:
        """The next event: its fields, ``data`` as JSON. Ends with the stream."""
        fields: dict[str, Any] = {}
        async with asyncio.timeout(30):
            while line := (await self.answer.content.readline()).decode():
                if line == "\n" and fields:
                    return fields
                name, _, value = line.rstrip("\n").partition(": ")
                if name:
                    fields[name] = json.loads(value) if name == "data" else value
        raise EOFError

    async def until(self, what: str) -> list[dict[str, Any]]:
        found = [await self.next()]
        while found[-1]["event"] != what:
            found.append(await self.next())
        return found


async def test_a_tail_tells_what_happens_and_is_resumed(api: Api, scene: Scene) -> None:
    await scene.step("one")
    async with Tail(api, scene.run_id) as tail:
        assert tail.answer.content_type == "text/event-stream"
        before = await tail.until("run")
        assert [(each["event"], each["data"]["key"]) for each in before[:-1]] == [("step", "one"), ("answer", "one")]
        assert before[-1]["data"]["status"] == "running"
        exchange = await scene.begin("two")
        step = await tail.next()
        assert (step["event"], step["data"]["key"]) == ("step", "two")
        await api.post(f"/v1/runs/{scene.run_id}/events", {"name": "go", "id": "e1"})
        assert (await tail.next())["data"]["id"] == "e1"
    async with Tail(api, scene.run_id, step["id"]) as tail:
        assert (await tail.next())["data"]["id"] == "e1", "it goes on behind the place that is named"
        await tail.until("run")
        await scene.record(exchange, key="two")
        assert (await tail.next())["event"] == "answer"
        await scene.end("done", 0)
        assert [each["event"] for each in await tail.until("end")][-1] == "end"
        with pytest.raises(EOFError):
            await tail.next()


async def test_tails_are_few(api: Api, scene: Scene) -> None:
    async with Tail(api, scene.run_id) as one, Tail(api, scene.run_id) as two:
        await one.next()
        await two.next()
        status, problem = await api.ask("GET", f"/v1/runs/{scene.run_id}/tail")
        assert status == 429
        assert "api_tails" in problem["detail"]
    assert (await api.ask("GET", "/v1/runs/nobody/tail"))[0] == 404
    assert (await api.ask("GET", f"/v1/runs/{scene.run_id}/tail", headers={"Last-Event-ID": "x"}))[0] == 422


async def test_approvals_are_listed_and_decided_once(api: Api, scene: Scene) -> None:
    for key, name in (("f00d#1", "manager"), ("f00d#2", "boss")):
        await scene.begin(key, own=Own(Kind.APPROVAL, name), request_body=b'{"request": {"sum": 5.00}}')
    page = await api.get("/v1/approvals?limit=1")
    rest = await api.get(f"/v1/approvals?limit=1&cursor={page['next']}")
    assert [each["id"] for each in page["approvals"] + rest["approvals"]] == ["f00d#1", "f00d#2"]
    assert rest["next"] is None
    assert page["approvals"][0]["request"] == {"sum": 5.0}
    assert [each["id"] for each in (await api.get(f"/v1/approvals?name=boss&run={scene.run_id}"))["approvals"]] == [
        "f00d#2"
    ]
    path = f"/v1/approvals/{scene.run_id}/manager"
    decided = await api.post(path, {"decision": "approve", "by": "ann", "comment": "fine"})
    assert (decided["id"], decided["decision"], decided["by"]) == ("f00d#1", "approve", "ann")
    status, problem = await api.ask("POST", path, {"decision": "decline"})
    assert (status, problem["first"]) == (409, decided)
    by_id = await api.ask("POST", f"/v1/approvals/{scene.run_id}/f00d%231", {"decision": "decline"})
    assert (by_id[0], by_id[1]["first"]) == (409, decided)
    assert (await api.ask("POST", f"/v1/approvals/{scene.run_id}/nobody", {"decision": "approve"}))[0] == 404
    assert (await api.ask("POST", path, {"decision": "maybe"}))[0] == 422
    assert (await api.ask("POST", path, {"decision": "approve", "by": "a\x00b"}))[0] == 422
    assert [each["id"] for each in (await api.get("/v1/approvals"))["approvals"]] == ["f00d#2"]


async def test_an_ambiguous_step_is_resolved(api: Api, scene: Scene) -> None:
    for key in ("one#1", "two"):
        exchange = await scene.begin(key)
        await scene.write(scene.stop(exchange, key))
        if key == "one#1":
            run = await api.get(f"/v1/runs/{scene.run_id}")
            assert (run["status"], run["stop"]) == ("ambiguous", {"step": "one#1", "message": "nobody knows"})
            path = f"/v1/runs/{scene.run_id}/steps/one%231/resolve"
            assert (await api.ask("POST", path, {"how": "send_again", "status": 200}))[0] == 422
            assert (await api.ask("POST", path, {"how": "assume_done", "headers": {"X": "a\r\nb"}}))[0] == 422
            assert (await api.post(path, {"how": "assume_done", "body": {"id": 1.50}}))["status"] == "queued"
            assert (await api.ask("POST", path, {"how": "send_again"}))[0] == 409
            scene = await scene.again()
    [step, other] = (await api.get(f"/v1/runs/{scene.run_id}/journal"))["steps"]
    assert json.loads(step["answers"][0]["body"]) == {"id": 1.5}
    assert step["answers"][0]["headers"] == [["Content-Type", "application/json"]]
    assert other["state"] == "ambiguous"
    assert (await api.ask("POST", f"/v1/runs/{scene.run_id}/steps/a%2Fb/resolve", {"how": "send_again"}))[0] == 404


async def test_a_local_step_is_resolved_by_what_its_agent_would_have_handed_in(api: Api, scene: Scene) -> None:
    said: list[tuple[dict[str, Any], Any]] = [
        ({}, {"output": None}),
        ({"body": {"error": "no"}}, {"error": "no"}),
        ({"body": '{"output": 1}'}, {"output": 1}),
    ]
    wrong: list[dict[str, Any]] = [{"body": {}}, {"body": 7}, {"body": "text"}, {"body": {"output": 1}, "status": 500}]
    for n, (given, kept) in enumerate(said):
        exchange = await scene.begin(f"k{n}", own=Own(Kind.LOCAL, "mail"))
        await scene.write(scene.stop(exchange, f"k{n}"))
        path = f"/v1/runs/{scene.run_id}/steps/k{n}/resolve"
        for each in wrong:
            status, problem = await api.ask("POST", path, {"how": "assume_done", **each})
            assert (status, "local step" in problem["detail"]) == (422, True)
        assert (await api.post(path, {"how": "assume_done", **given}))["status"] == "queued"
        step = (await api.get(f"/v1/runs/{scene.run_id}/journal"))["steps"][n]
        assert json.loads(step["answers"][0]["body"]) == kept
        scene = await scene.again()


async def test_a_run_is_forked(api: Api, scene: Scene) -> None:
    for key in ("one", "two"):
        await scene.step(key, Effect.IDEMPOTENT)
    await scene.end("done", 0)
    path = f"/v1/runs/{scene.run_id}/fork"
    preview = await api.post(path, {"before": 2, "preview": True})
    assert (preview["run"], [each["n"] for each in preview["replayed"]], [each["n"] for each in preview["sent"]]) == (
        None, [1], [2],
    )  # fmt: skip
    assert (await api.post(path, {"before": 2, "run": "other"}))["run"] == "other"
    assert (await api.get("/v1/runs/other"))["id"] == "other"
    assert (await api.ask("POST", path, {"before": 9}))[0] == 409
    assert (await api.ask("POST", path, {"before": 2, "run": "other"}))[0] == 409
