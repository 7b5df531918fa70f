"""Slack, Twilio, SendGrid, a forge, and what is passed on to another server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sandbox.client import Sandbox
from tests.sandbox.conftest import Client

SLACK = {"channel": "#ops", "text": "hello"}
SMS = {"To": "+1", "From": "+2", "Body": "hello"}
MAIL = {"personalizations": [{"to": [{"email": "a@b"}]}], "from": {"email": "c@d"}, "subject": "s"}
MESSAGES = "/twilio/2010-04-01/Accounts/AC1/Messages.json"


def test_every_message_is_carried(sandbox: Sandbox, ask: Client) -> None:
    first = ask("POST", "/slack/chat.postMessage", form=SLACK)
    second = ask("POST", "/slack/chat.postMessage", form=SLACK, key="k")
    assert first.json["ok"]
    assert first.json["ts"] != second.json["ts"]
    assert ask("POST", MESSAGES, form=SMS).json["sid"] == "SM" + "1".zfill(32)
    assert ask("POST", "/sendgrid/v3/mail/send", body=MAIL).headers["X-Message-Id"] == "mail-0001"
    assert sandbox.counts() == {"slack": 2, "twilio": 1, "sendgrid": 1}


def test_what_is_not_understood_is_not_carried(sandbox: Sandbox, ask: Client) -> None:
    assert ask("POST", "/slack/chat.postMessage", form={"channel": "#ops"}).json == {"ok": False, "error": "no_text"}
    assert not ask("POST", "/slack/chat.update", form=SLACK).json["ok"]
    assert ask("POST", MESSAGES, form={"To": "+1"}).status == 400
    assert ask("GET", MESSAGES).status == 404
    assert ask("POST", "/sendgrid/v3/mail/send", body=b"{").status == 400
    assert sandbox.counts() == {}


def test_issues_and_comments(sandbox: Sandbox, ask: Client) -> None:
    repository = "/github/repos/ada/engine"
    assert ask("GET", repository).json["full_name"] == "ada/engine"
    issue = ask("POST", f"{repository}/issues", body={"title": "t"}).json
    assert (issue["number"], issue["url"]) == (1, "/repos/ada/engine/issues/1")
    assert ask("POST", f"/github{issue['url']}/comments", body={"body": "b"}).status == 201
    assert ask("POST", f"/github{issue['url']}/comments", body={}).status == 422
    assert ask("POST", f"{repository}/issues/2/comments", body={"body": "b"}).status == 404
    assert ask("GET", f"/github{issue['url']}").json["comments"] == 1
    assert [each["body"] for each in ask("GET", f"/github{issue['url']}/comments").json] == ["b"]
    assert sandbox.counts() == {"github": 2}


def test_they_go_on_where_the_log_ends(tmp_path: Path) -> None:
    for n in (1, 2):
        with Sandbox.start(tmp_path / "sandbox.log") as sandbox:
            ask = Client(sandbox.port)
            assert ask("POST", MESSAGES, form=SMS).json["sid"] == f"SM{n:032}"
            assert ask("POST", "/github/repos/a/b/issues", body={"title": "t"}).json["number"] == n


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{self.command} {self.path} {self.headers['Host']} ".encode()
        body += self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(404 if "nowhere" in self.path else 201)
        self.send_header("Content-Type", "text/echo")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def another() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_are_passed_on_and_counted(tmp_path: Path, another: str) -> None:
    with Sandbox.start(tmp_path / "sandbox.log", passed={"other": another}) as sandbox:
        ask = Client(sandbox.port)
        got = ask("POST", "/other/a%2Fb?c=d", body=b"text")
        assert (got.status, got.headers["Content-Type"]) == (201, "text/echo")
        assert got.body == f"POST /a%2Fb?c=d 127.0.0.1:{sandbox.port} text".encode()
        assert ask("GET", "/other/a").status == 201
        assert ask("POST", "/other/nowhere").status == 404
        assert sandbox.counts() == {"other": 1}


def test_one_that_is_away_is_told_of(tmp_path: Path) -> None:
    with Sandbox.start(tmp_path / "sandbox.log", passed={"other": "http://127.0.0.1:9"}) as sandbox:
        assert Client(sandbox.port)("GET", "/other/a").status == 502
