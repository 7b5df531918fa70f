"""What somebody else made up is not repeated to him whole."""

import json

import pytest

from tests.stack import Attempt, Stack

pytestmark = pytest.mark.check_all

LONG = "n" * 20_000
HOST = "http://twiceshy.internal"
ASKED = [
    ("POST", "/steps", {"name": LONG}, {}),
    ("POST", "/steps", {"name": "x", LONG: 1}, {}),
    ("POST", "/steps", {"name": "x"}, {"Twiceshy-Step": LONG}),
    ("POST", "/sleep", {LONG: 1}, {}),
    ("POST", "/sleep", {"until": LONG}, {}),
    ("POST", "/sleep", {"seconds": LONG}, {}),
    ("POST", f"/events/{LONG}/wait", {}, {}),
    ("POST", f"/approvals/{LONG}/wait", {}, {}),
    ("POST", "/events/go/wait", {LONG: 1}, {}),
    ("POST", "/runs", {"agent": LONG}, {}),
    ("POST", f"/runs/{LONG}/wait", {}, {}),
    ("POST", "/random", {LONG: 1}, {}),
    ("POST", "/continue", {LONG: 1}, {}),
    ("GET", f"/steps/{LONG}", None, {}),
    ("PUT", f"/steps/{LONG}", {"output": 1}, {}),
    ("PUT", f"/steps/{LONG}", {LONG: 1}, {}),
    ("POST", f"/steps/{LONG}/heartbeat", {}, {}),
    ("POST", f"/steps/{LONG}/heartbeat", {LONG: 1}, {}),
    ("GET", f"/{LONG}", None, {}),
    ("PUT", "/result", LONG, {}),
    ("POST", "/now", LONG, {}),
]


@pytest.mark.parametrize(("method", "path", "body", "headers"), ASKED, ids=range(len(ASKED)))
def test_a_refusal_is_short(
    shared: Stack, method: str, path: str, body: dict[str, int] | str | None, headers: dict[str, str]
) -> None:
    refused = shared.claim("long").ask(method, HOST + path, body, headers)
    assert 400 <= refused.status < 500
    assert len(refused.json()["message"]) < 1000, refused.json()["message"]
    assert all(len(value) < 1000 for value in refused.headers.values())


def test_nor_is_a_run_or_a_host(shared: Stack) -> None:
    for attempt in (Attempt(LONG, "t", shared.sidecar.port), Attempt("r", LONG, shared.sidecar.port)):
        refused = attempt.ask("GET", HOST + "/run")
        assert refused.status == 400
        assert len(refused.json()["message"]) < 1000
    host = "h" * 5000
    attempt = shared.claim("long")
    for url in (f"http://{host}/", f"http://{host}.twiceshy.internal/{LONG}", f"{HOST}:99999{LONG}/"):
        refused = attempt.ask("GET", url)
        assert len(refused.body) < 6000, json.loads(refused.body)["message"]


def test_a_made_up_step_is_no_header(shared: Stack) -> None:
    attempt = shared.claim("header")
    for key in ("a%0d%0aX-Mine:%201", "%c3%a9", "%00", "%e2%80%a8"):
        for method, path, body in (("POST", f"{key}/heartbeat", "{}"), ("PUT", key, "{}"), ("GET", key, None)):
            refused = attempt.ask(method, f"{HOST}/steps/{path}", body)
            assert 400 <= refused.status < 500
            assert "x-mine" not in refused.headers
            assert "twiceshy-step" not in refused.headers
