"""Every SDK against every refusal: it tries once, and whoever reads its exception learns why."""

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.kit import lay_out
from runtime.launch.environment import PROXY_NAMES, Kit, environment
from tests.conftest import fresh_database, scratch
from tests.sdk.results import installed, note
from tests.sdk.sdks import QUICK, SDKS, Sdk, each
from tests.stack import Attempt, Reply, Stack, stack

COUNTING = "tests.sdk.counting_sidecar"
SLEEP = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": sys.argv[1]}))
opener.open("http://twiceshy.internal/sleep", b'{"seconds": 86400}')
"""


@dataclass(frozen=True)
class Refused:
    """Credentials of a run whose every request is refused, and the words. Without a run: no credentials at all."""

    code: str
    run: str
    token: str
    message: str
    reason: str


class Refusing:
    """A sidecar that counts its refusals, and one run for each of them."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.kit: Kit = lay_out(stack.folder)
        ways = (self._fenced, self._diverged, self._ambiguous, self._parked)
        self.each = [*[self._refused(way()) for way in ways], self._unnamed()]

    def run(self, sdk: Sdk, refused: Refused, folder: Path) -> tuple[int, str]:
        """Run *sdk*'s program with these credentials: how often it was refused, and what it said."""
        given = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        proxy = f"127.0.0.1:{self.stack.sidecar.port}"
        given = environment(given, run=refused.run, token=refused.token, proxy=proxy, kit=self.kit)
        if not refused.token:
            given |= dict.fromkeys(PROXY_NAMES, f"http://{proxy}")
        given |= sdk.given(self.stack.sandbox.url) | {"HERE": str(folder)}
        before = self.stack.sidecar.log.stat().st_size
        ended = subprocess.run(
            [*sdk.command(), str(folder)], env=given, cwd=folder, stdin=subprocess.DEVNULL, timeout=100,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert ended.returncode != 0, ended.stdout
        with self.stack.sidecar.log.open("rb") as log:
            log.seek(before)
            lines = [json.loads(line) for line in log if line.startswith(b'{"refused"')]
        here = ["127.0.0.1", self.stack.sandbox.port]
        return [(each["refused"], each["to"] == here) for each in lines].count((refused.code, True)), ended.stdout

    def _refused(self, pair: tuple[str, Attempt]) -> Refused:
        code, attempt = pair
        reply = attempt.ask("POST", self.stack.url("/any/asked"))
        return self._as_said(code, reply, attempt.run, attempt.token or "")

    def _as_said(self, code: str, reply: Reply, run: str, token: str) -> Refused:
        assert reply.error == code, (code, reply)
        return Refused(code, run, token, reply.json()["message"], reply.reason)

    def _fenced(self) -> tuple[str, Attempt]:
        attempt = self.stack.claim("taken")
        self.stack.claim("taken")
        return "fenced", attempt

    def _diverged(self) -> tuple[str, Attempt]:
        attempt = self.stack.claim("elsewhere")
        for path in ("/any/here", "/any/there"):
            reply = attempt.ask("POST", self.stack.url(path), headers={"Twiceshy-Step": "first"})
        assert reply.error == "diverged"
        return "diverged", attempt

    def _ambiguous(self) -> tuple[str, Attempt]:
        attempt = self.stack.claim("unknown")
        self.stack.sandbox.fault(match={"path": "/email/send"}, drop="after")
        attempt.ask("POST", self.stack.url("/email/send"), {"to": "ada@example.org"})
        return "ambiguous", attempt

    def _parked(self) -> tuple[str, Attempt]:
        attempt = self.stack.claim("waiting")
        proxy = f"http://{attempt.run}:{attempt.token}@127.0.0.1:{attempt.port}"
        # In a process group of its own: one that works is not parked.
        subprocess.run(
            [sys.executable, "-c", SLEEP, proxy], start_new_session=True, stderr=subprocess.DEVNULL, timeout=60
        )
        return "parked", attempt

    def _unnamed(self) -> Refused:
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.sidecar.port)
        connection.request("POST", self.stack.url("/any/asked"))
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        reply = Reply(answer.status, answer.reason, headers, answer.read())
        connection.close()
        return self._as_said("no-run", reply, "nobody", "")


@pytest.fixture(scope="module")
def refusing(server: str, template: str) -> Iterator[Refusing]:
    databases = fresh_database(server, template)
    with scratch("ts-") as home:
        with stack(next(databases), home, tls=True, module=COUNTING, hold=0.1, park_quiet=0.1) as made:
            yield Refusing(made)
    next(databases, None)


@pytest.mark.check_all
@each(SDKS)
def test_every_refusal_is_met_once_and_read(sdk: Sdk, refusing: Refusing, tmp_path: Path) -> None:
    with note("refusals", sdk) as result:
        result.count(refusals=[each.code for each in refusing.each])
        found = {each.code: met(*refusing.run(sdk, each, tmp_path), each) for each in refusing.each}
        assert found == {each.code: (sdk.begins, sdk.words) for each in refusing.each}


@QUICK
def test_who_was_taken_over_ends_at_once(sdk: Sdk, refusing: Refusing, tmp_path: Path) -> None:
    installed(sdk)
    fenced = refusing.each[0]
    assert met(*refusing.run(sdk, fenced, tmp_path), fenced) == (sdk.begins, sdk.words)


def met(count: int, said: str, refused: Refused) -> tuple[int, str]:
    """How often, and which of our words were said; all that was said where they were not."""
    said = plain(said)
    if plain(refused.message)[:25] in said:  # Node breaks long texts into pieces
        return count, "message"
    return count, "reason" if plain(refused.reason) in said else said


def plain(text: str) -> Any:
    """Without what differs by the way in which a text was quoted, and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[\\\"'`]", "", text.replace("\\n", " ")))
