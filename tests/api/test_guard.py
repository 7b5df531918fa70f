"""Nobody without the key, no page of another origin, no other name; and every no is a problem."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.api import keys
from runtime.database import Connection, connect
from runtime.settings import Settings
from tests.api.conftest import Api


@pytest.fixture
def settings() -> Settings:
    return Settings(poll=0.05, database_wait=5.0, input_max=100_000, payload_max=50_000, api_body_max=200_000)


async def raw(api: Api, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and answer of a request that is written by hand."""
    host, _, port = api.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n" + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


async def test_without_the_key_nothing_is_told(api: Api) -> None:
    given = ["Bearer ", f"Basic {api.key}", f"Bearer {api.key[:-1]}", f"Bearer ts-{'0' * 16}-{'x' * 43}", api.key]
    for authorization in ({}, {"Cookie": f"key={api.key}"}, *({"Authorization": each} for each in given)):
        for method, path in (("GET", "/v1/runs"), ("POST", "/v1/runs"), ("GET", f"/v1/runs?key={api.key}")):
            async with api.session.request(method, api.url + path, headers=authorization) as answer:
                assert (answer.status, answer.content_type) == (401, "application/problem+json"), authorization
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    for path in ("/", "/healthz", "/openapi.json", "/docs", "/docs/page.js", "/docs/page.css"):
        async with api.session.get(api.url + path) as answer:
            assert answer.status == 200, path


async def test_the_database_has_no_key_and_the_folder_has_it_for_its_owner(
    api: Api, conn: Connection, tmp_path: Path
) -> None:
    assert keys.key_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert keys.read(keys.key_file(tmp_path)) == api.key
    row = await conn.fetchrow("SELECT * FROM twiceshy.api_key")
    assert row is not None
    assert api.key.rpartition("-")[2] not in str(list(row.values()))
    assert await keys.of_folder(conn, tmp_path) == api.key
    await conn.execute("DELETE FROM twiceshy.api_key")
    assert await keys.of_folder(conn, tmp_path) != api.key, "one that the database does not know is of no use"
    assert (await api.ask("GET", "/v1/runs"))[0] == 401


async def test_who_starts_at_the_same_instant_has_the_same_key(dsn: str, tmp_path: Path) -> None:
    connections = [await connect(dsn, name="test") for _ in range(8)]
    found = await asyncio.gather(*(keys.of_folder(each, tmp_path) for each in connections))
    assert set(found) == {keys.read(keys.key_file(tmp_path))}
    assert [each.name for each in tmp_path.iterdir()] == ["api.key"]
    for each in connections:
        await each.close()


async def test_no_page_of_another_origin(api: Api) -> None:
    for path in ("/v1/runs", "/docs", "/openapi.json", "/healthz"):
        await for_its_own_pages_only(api, path)


async def for_its_own_pages_only(api: Api, path: str) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": api.url + "1"},
                    {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):  # fmt: skip
        assert (await api.ask("GET", path, headers=headers))[0] == 403, headers
        status, _ = await api.ask("OPTIONS", path, headers=headers | {"Access-Control-Request-Method": "GET"})
        assert status == 403
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:7778", "api.internal", ""):
        assert (await api.ask("GET", path, headers={"Host": name}))[0] == 400, name
    async with api.session.options(api.url + path) as answer:
        assert answer.status == 405
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    for headers in ({"Origin": api.url, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
                    {"Host": "localhost:1"}, {"Host": "[::1]:7778"}, {"Host": "10.0.0.7"}):  # fmt: skip
        known = {"Authorization": f"Bearer {api.key}"}
        async with api.session.get(api.url + path, headers=headers | known) as answer:
            assert answer.status == 200, headers


async def test_a_request_that_came_through_an_agents_proxy_is_refused(api: Api) -> None:
    assert (await api.ask("GET", "/v1/runs", headers={"Via": "1.1 twiceshy-0123456789ab"}))[0] == 403


async def test_bodies_are_json_and_bounded(api: Api, settings: Settings) -> None:
    run = (await api.post("/v1/runs", {"agent": "a"}))["id"]
    events = f"/v1/runs/{run}/events"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for path in ("/v1/runs", events, f"/v1/runs/{run}/cancel"):
            status, _ = await api.ask("POST", path, data=b'{"agent":"a"}', headers={"Content-Type": kind})
            assert status == 415, (kind, path)
    for text in (
        b"",
        b"{",
        b'{"agent": "a"} x',
        b'{"agent": NaN}',
        b"\xff\xfe{}",
        b'{"agent":"a","agent":"a"}',
        b"[" * 500,
    ):
        status, problem = await api.ask("POST", "/v1/runs", data=text, headers={"Content-Type": "application/json"})
        assert status == 400, text
        assert problem["detail"]
    bodies: tuple[Any, ...] = ([], 5, None, {"agent": 5}, {"agent": "a", "more": 1}, {"agent": "a", "priority": 1.5},
                 {"agent": "a", "priority": True}, {"agent": "a", "attributes": {"x": 5}})  # fmt: skip
    for body in bodies:
        text = json.dumps(body).encode()
        status, problem = await api.ask("POST", "/v1/runs", data=text, headers={"Content-Type": "application/json"})
        assert status == 422, body
        assert problem["errors"][0]["where"].startswith("body")
    status, problem = await api.ask("POST", events, {"name": "go", "payload": "x" * settings.payload_max})
    assert status == 422
    assert "payload_max" in problem["detail"]
    status, problem = await api.ask("POST", "/v1/runs", {"agent": "a", "input": "x" * settings.input_max})
    assert status == 413
    assert "input_max" in problem["detail"]
    kind = "Host: localhost\nContent-Type: application/json\nConnection: close"
    length = settings.api_body_max + 1
    head = f"POST /v1/runs HTTP/1.1\nAuthorization: Bearer {api.key}\n{kind}\nContent-Length: {length}\n"
    status, answer = await raw(api, head)
    assert status == 413
    assert b"api_body_max" in answer


async def test_another_method_is_told_which_there_are(api: Api) -> None:
    async with api.session.put(f"{api.url}/v1/runs", headers={"Authorization": f"Bearer {api.key}"}) as answer:
        assert (answer.status, answer.content_type, answer.headers["Allow"]) == (
            405, "application/problem+json", "GET, POST",
        )  # fmt: skip


async def test_who_goes_before_his_body_is_whole_is_no_fault_of_the_server(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    head = f"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.key}\r\n"
    writer.write(
        f"{head}Content-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert b"100 Continue" in await reader.readline()  # it is being read
    writer.transport.abort()
    await api.get("/v1/runs")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
