"""The API does what its document says, whatever is sent to it."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime.agents import AgentTable
from runtime.api import openapi
from runtime.api.server import ROUTES
from runtime.database import Connection
from runtime.settings import Settings
from tests.api.conftest import Api, served
from twiceshy import ChildFailed, Client, TimedOut


class Anybody(dict[str, AgentTable]):
    """Every agent is declared."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> AgentTable:
        return AgentTable(command=["true"])


@pytest.fixture
def apart(dsn: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Address and key of an API in a thread of its own, where nothing takes long."""
    settings = Settings(poll=0.05, database_wait=5.0, api_tail_max=0.2, api_wait_max=0.2)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    told: list[str] = []
    done = asyncio.Event()

    async def serve() -> None:
        async with served(dsn, settings, tmp_path, Anybody()) as (_, url, key):
            told.extend((url, key))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    yield told[0], told[1]
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


def schemathesis(url: str, key: str, folder: Path, *more: str) -> None:
    """All its checks; the seed stands in what it prints."""
    program = str(Path(sys.executable).with_name("schemathesis"))
    asked = [program, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {key}", "--request-timeout", "20",
             "--warnings", "off", *more]  # fmt: skip
    run = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]


@pytest.mark.check_all
def test_the_api_passes_schemathesis(apart: tuple[str, str], tmp_path: Path) -> None:
    schemathesis(*apart, tmp_path, "--max-examples", "50")


def test_the_library_speaks_to_it(apart: tuple[str, str]) -> None:
    client = Client(*apart)
    run = client.start("a", {"n": 1}, key="once", attributes={"team": "ops"})
    assert client.start("a", {"n": 1}, key="once", attributes={"team": "ops"}) == run
    client.signal(run, "go", {"by": "ann"}, id="e1")
    with pytest.raises(TimedOut):
        client.result(run, timeout=0.1)
    client.cancel(run)
    with pytest.raises(ChildFailed, match="cancelled"):
        client.result(run, timeout=5)


async def test_the_document_says_what_there_is(api: Api) -> None:
    document = await api.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(route.method, route.path) for route in ROUTES}
    assert document == json.loads(json.dumps(openapi.document(ROUTES, api.settings, document["info"]["version"])))
    [limit] = [each for each in document["paths"]["/v1/runs"]["get"]["parameters"] if each["name"] == "limit"]
    assert limit["schema"]["maximum"] == api.settings.api_page_max


# ---- what no name, id or payload may be

ODD = ["\x00", "a\x00b", "\ud800", "x" * 20_000, "../../etc/passwd", "a\r\nX: y", "", " ", "a b", "ä", "💥", "%00",
       "..", ".%2e", "a/b", "a\\b", "';--", "{{x}}", "\u202e", "NaN", "null", "-1", "1e999"]  # fmt: skip
#: Of these, what names may be.
FINE = {"..", "NaN", "null", "-1", "1e999"}


def quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


async def test_odd_names_are_refused_wherever_they_stand(api: Api, conn: Connection) -> None:
    run = (await api.post("/v1/runs", {"agent": "a"}))["id"]
    before = await kept(conn)
    for odd in ODD:
        name = quoted(odd)
        for method, path, content in (
            ("GET", f"/v1/runs/{name}", None), ("GET", f"/v1/runs/{name}/result", None),
            ("GET", f"/v1/runs/{name}/journal", None), ("GET", f"/v1/runs/{name}/tail", None),
            ("POST", f"/v1/runs/{name}/cancel", None), ("POST", f"/v1/runs/{name}/retry", None),
            ("POST", f"/v1/runs/{name}/events", {"name": "go"}), ("POST", f"/v1/runs/{name}/fork", {"before": 1}),
            ("POST", f"/v1/runs/{run}/steps/{name}/resolve", {"how": "send_again"}),
            ("POST", f"/v1/approvals/{run}/{name}", {"decision": "approve"}),
            ("POST", f"/v1/approvals/{name}/x", {"decision": "approve"}),
            ("GET", f"/v1/runs?cursor={name}", None), ("GET", f"/v1/runs?attribute={name}", None),
            ("GET", f"/v1/runs?status={name}", None), ("GET", f"/v1/runs?created_after={name}", None),
            ("GET", f"/v1/runs?{name}=1", None), ("GET", f"/v1/approvals?cursor={name}", None),
        ):  # fmt: skip
            # "%2E%2E" is the parent folder, for a client: what is left of the path is something else, or nothing.
            more = (
                {}
                if content is None
                else {"data": json.dumps(content), "headers": {"Content-Type": "application/json"}}
            )
            status, problem = await raw_path(api, method, path, more)
            assert 400 <= status < 500, (odd[:20], method, path[:60], status)
            assert problem["detail"], path
        if odd in FINE:
            continue
        for path, body in (
            ("/v1/runs", {"agent": odd}), ("/v1/runs", {"agent": "a", "run": odd}),
            ("/v1/runs", {"agent": "a", "attributes": {odd: "x"}}),
            (f"/v1/runs/{run}/events", {"name": odd}), (f"/v1/runs/{run}/events", {"name": "go", "id": odd}),
        ):  # fmt: skip
            status, problem = await api.ask("POST", path, body)
            assert 400 <= status < 500, (odd[:20], body, status)
    assert await kept(conn) == before


async def raw_path(api: Api, method: str, path: str, more: Mapping[str, Any]) -> tuple[int, Any]:
    """A path as it is written."""
    from yarl import URL

    headers = {"Authorization": f"Bearer {api.key}"} | dict(more.get("headers", {}))
    async with api.session.request(
        method, URL(api.url + path, encoded=True), headers=headers, data=more.get("data")
    ) as answer:
        api.statuses.append(answer.status)
        if answer.content_type != "application/problem+json":
            # Of a first line that is longer than any of ours, aiohttp itself says no.
            assert answer.status == 400, await answer.text()
            return 400, {"detail": await answer.text()}
        return answer.status, await answer.json(content_type=None)


async def kept(conn: Connection) -> list[Any]:
    return [
        await conn.fetch(f"SELECT * FROM twiceshy.{table}")
        for table in ("run", "event", "attribute", "start", "approval")
    ]


PAYLOADS = [b"NaN", b"Infinity", b"-Infinity", b'"\xed\xa0\x80"', b"\x00", b'"\x00"', b'"a\nb"', b"01", b"1.", b"'x'",
            b"[1,]", b"{1:2}", b"[" * 5000 + b"]" * 5000, b"\xef\xbb\xbf1", b"1 2"]  # fmt: skip


async def test_what_is_no_json_is_kept_nowhere(api: Api, conn: Connection) -> None:
    run = (await api.post("/v1/runs", {"agent": "a"}))["id"]
    before = await kept(conn)
    for payload in PAYLOADS:
        for path, head in (
            ("/v1/runs", b'{"agent": "a", "input": '),
            (f"/v1/runs/{run}/events", b'{"name": "go", "payload": '),
        ):
            status, _ = await api.ask(
                "POST", path, data=head + payload + b"}", headers={"Content-Type": "application/json"}
            )
            assert 400 <= status < 500, payload[:20]
    for key in ("x" * 201, "ä", ""):
        assert (await api.ask("POST", "/v1/runs", {"agent": "a"}, headers={"Idempotency-Key": key}))[0] == 422
    for value in ("\x00", "a\r\nb", "x" * 501, "\ud800", "\x9b"):
        assert (await api.ask("POST", "/v1/runs", {"agent": "a", "attributes": {"x": value}}))[0] == 422
    attributes = {f"n{n}": "x" for n in range(33)}
    assert (await api.ask("POST", "/v1/runs", {"agent": "a", "attributes": attributes}))[0] == 422
    assert await kept(conn) == before


STRANGE = [r'"\u0000"', r'"\ud800"', '"💥"', "1e999", "1.10", '{"a": 1, "a": 2}', '"../x"', r'"a\r\nb"', '"<script>"',
           "[[[[[]]]]]", "123456789012345678901234567890", f'"{"x" * 20_000}"']  # fmt: skip


async def test_strange_json_is_kept_as_it_was_written(api: Api) -> None:
    for text in STRANGE:
        body = f'{{"agent": "a", "input": {text}}}'.encode()
        run = await api.post("/v1/runs", data=body, headers={"Content-Type": "application/json"})
        event = f'{{"name": "go", "payload": {text}}}'.encode()
        await api.post(f"/v1/runs/{run['id']}/events", data=event, headers={"Content-Type": "application/json"})
        for path in (f"/v1/runs/{run['id']}", f"/v1/runs/{run['id']}/events"):
            async with api.session.get(api.url + path, headers={"Authorization": f"Bearer {api.key}"}) as answer:
                assert text in await answer.text()
