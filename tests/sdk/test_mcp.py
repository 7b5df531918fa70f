"""The real client of MCP, unchanged, over TLS: killed after each call and inside each, and no tool is called twice."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.sdk.place import Came, Place, restarts
from tests.sdk.results import note
from tests.sdk.sdks import PROGRAMS, named
from tests.stack import Attempt, Stack, stack

MCP = named("mcp")
CALLS = [
    ("refund", {"what": "tea"}),
    ("report", {"what": "milk"}),
    ("transfer", {"what": "5 EUR"}),
    ("fail", {}),
    ("refund", {"what": "tea"}),
]
EFFECTS = ["refund", "report", "transfer", "refund"]
#: What is held at its gate, and in which manner.
HELD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"body": '"refund"'}, {"hold": "0"}),
    ({"body": '"report"'}, {"hold_events": {2: "1"}}),
    ({"body": '"accept"'}, {"hold_before": "2"}),
    ({"body": '"fail"'}, {"hold": "3"}),
    ({"body": '"refund"'}, {"hold": "4", "nth": 2}),
]

pytestmark = pytest.mark.check_all


def called(came: Came) -> list[tuple[str, Any]]:
    """What was called of a tool, without what the SDK counts up."""
    asked = [each.json()["params"] for each in came.calls if each.method == "POST" and b'"tools/call"' in each.body]
    return [(each["name"], each.get("arguments") or {}) for each in asked]


def nothing_happened_twice(came: Came, lines: list[str]) -> None:
    assert called(came) == CALLS
    assert [effect for _, effect, *_ in came.effects] == EFFECTS
    restarts(came.lines, lines)


def test_killed_everywhere(place: Place, tmp_path: Path) -> None:
    with note("kills", MCP) as result:
        lines = undisturbed(place, tmp_path)
        result.count(after=len(lines), inside=len(HELD))
        killed_after_each_call(place, lines, tmp_path)
        killed_inside_each_call(place, lines, tmp_path)


def undisturbed(place: Place, tmp_path: Path) -> list[str]:
    """What the program says when nobody disturbs it."""
    with place.stage(MCP, tmp_path / "undisturbed") as stage:
        whole = stage.came(stage.start())
        assert stage.outcomes == ["done"]
        nothing_happened_twice(whole, whole.lines)
        return whole.lines


def killed_after_each_call(place: Place, lines: list[str], tmp_path: Path) -> None:
    with place.stage(MCP, tmp_path / "after") as stage:
        came = stage.came(stage.start(DIES="1"))
        assert stage.outcomes == [*["died"] * len(lines), "done"]
        assert came.lines == [line for n in range(1, len(lines) + 1) for line in lines[:n]] + lines
        nothing_happened_twice(came, lines)


def killed_inside_each_call(place: Place, lines: list[str], tmp_path: Path) -> None:
    """In the midst of a stream too, and while a person's word is on its way to the server."""
    with place.stage(MCP, tmp_path / "inside") as stage:
        stage.sandbox.faults(*[{"match": {"path": "/mcp", **match}, "nth": 1, **fault} for match, fault in HELD])
        launcher = stage.start()
        for n in range(len(HELD)):
            stage.wait_held(str(n))
            killed = stage.kill()
            stage.wait_asked(killed, n + 1)
            stage.sandbox.release(str(n))
        came = stage.came(launcher)
        assert stage.outcomes == [*["died"] * len(HELD), "done"]
        nothing_happened_twice(came, lines)


# ---- what it tells the model of a refusal


@pytest.fixture(scope="module")
def plain(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    databases = fresh_database(server, template)
    with stack(next(databases), tmp_path_factory.mktemp("plain")) as made:
        yield made
    next(databases, None)


def said_by(attempt: Attempt, url: str) -> list[str]:
    """What the program prints that is refused in *attempt*."""
    sidecar = f"http://{attempt.run}:{attempt.token}@127.0.0.1:{attempt.port}"
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    ran = subprocess.run(
        [MCP.command()[0], str(PROGRAMS / "mcp_refused.py")], capture_output=True, text=True, timeout=60,
        env={**clean, "HTTP_PROXY": sidecar, "SANDBOX_URL": url},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_fenced_client_reads_why(plain: Stack) -> None:
    first = plain.claim("fenced")
    plain.claim("fenced")
    [words] = said_by(first, plain.sandbox.url)
    assert words.startswith("MCPError ")
    assert "another attempt took the run over" in words


def test_a_call_whose_outcome_is_unknown_says_who_must_decide(plain: Stack) -> None:
    plain.sandbox.fault(match={"path": "/mcp", "body": "refund"}, drop="after")
    opened, words = said_by(plain.claim("unknown"), plain.sandbox.url)
    assert (opened, words.split()[0]) == ("opened", "MCPError")
    assert "twiceshy resolve unknown" in words


def test_a_server_that_is_not_there_is_told(plain: Stack) -> None:
    [words] = said_by(plain.claim("unreached"), "http://127.0.0.1:9")
    assert words.startswith("MCPError 127.0.0.1:9: ")
    assert words.endswith("Nothing was sent.")
