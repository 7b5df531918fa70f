"""The library's client, blocking and awaited, against the API."""

import asyncio

import pytest

import twiceshy
from runtime.database import Connection
from tests.api.conftest import Api
from twiceshy import aio, asking, drive, wire


@pytest.fixture
def client(api: Api) -> aio.Client:
    return aio.Client(api.url, key=api.key)


@pytest.fixture
def environment(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWICESHY_API", api.url)
    monkeypatch.setenv("TWICESHY_API_KEY", api.key)
    # An agent's proxy does not go to the API.
    monkeypatch.setenv("HTTP_PROXY", "http://run:token@127.0.0.1:9")


async def test_the_same_start_is_the_same_run(client: aio.Client, api: Api) -> None:
    started = await asyncio.gather(*(client.start("refund", {"order": "A-1"}, key="k") for _ in range(5)))
    assert len(set(started)) == 1
    named = await client.start("a", [1], run="mine", priority=3, attributes={"tenant": "x"})
    found = await api.get(f"/v1/runs/{named}")
    assert (named, found["input"], found["priority"], found["attributes"]) == ("mine", [1], 3, {"tenant": "x"})


async def test_what_is_refused_says_why(client: aio.Client, api: Api) -> None:
    with pytest.raises(twiceshy.Refused, match="order"):
        await client.start("refund", {})
    with pytest.raises(twiceshy.Refused, match="no run"):
        await client.cancel("nobody")
    with pytest.raises(twiceshy.Refused) as wrong:
        await aio.Client(api.url, key="wrong").cancel("nobody")
    assert "401" in wrong.value.code


async def test_a_signal_is_an_event(client: aio.Client, api: Api) -> None:
    run = await client.start("a")
    for _ in range(2):
        await client.signal(run, "paid", {"cents": 5}, id="one")
    await client.signal(run, "paid")
    events = (await api.get(f"/v1/runs/{run}/events"))["events"]
    assert [(each["name"], each["payload"]) for each in events] == [("paid", {"cents": 5}), ("paid", None)]


async def test_what_is_asked_again_is_done_once(client: aio.Client, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to every request is lost once, and nobody gave a key or an id."""
    ask, lost = drive._ask_awaited, set[str]()

    async def loses(route: wire.Route, timeout: float | None) -> wire.Reply:
        reply = await ask(route, timeout)
        line = route.data.decode("utf-8").split(" HTTP/", 1)[0]
        if line in lost:
            return reply
        lost.add(line)
        raise ConnectionResetError("lost")

    monkeypatch.setattr(drive, "_ask_awaited", loses)
    run = await client.start("a")
    await client.signal(run, "paid")
    await client.signal(run, "paid")
    assert [each["id"] for each in (await api.get("/v1/runs"))["runs"]] == [run]
    assert len((await api.get(f"/v1/runs/{run}/events"))["events"]) == 2
    assert len(lost) == 2


async def test_a_result_is_waited_for(client: aio.Client, conn: Connection) -> None:
    run = await client.start("a")
    with pytest.raises(twiceshy.TimedOut, match=run):
        await client.result(run, timeout=0.05)
    waiting = asyncio.create_task(client.result(run, timeout=20))
    await asyncio.sleep(0)
    await conn.execute("UPDATE twiceshy.run SET status = 'done', result = '[7]', ended_at = now() WHERE id = $1", run)
    assert await waiting == [7]
    other = await client.start("a")
    await client.cancel(other)
    with pytest.raises(twiceshy.ChildFailed, match="is cancelled") as failed:
        await client.result(other)
    assert (failed.value.run, failed.value.status) == (other, "cancelled")


async def test_the_same_from_a_thread_by_what_the_environment_names(environment: None) -> None:
    def work() -> str:
        client = twiceshy.Client()
        run = client.start("a", {"n": 1})
        client.signal(run, "go")
        with pytest.raises(TimeoutError):
            client.result(run, timeout=0)
        client.cancel(run)
        return run

    assert await asyncio.to_thread(work)


def test_a_client_wants_a_key() -> None:
    with pytest.raises(ValueError, match="TWICESHY_API_KEY"):
        twiceshy.Client()


async def test_an_api_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TRIES", 2)
    with pytest.raises(twiceshy.Unreachable):
        await aio.Client("http://127.0.0.1:9", key="k").cancel("a")
