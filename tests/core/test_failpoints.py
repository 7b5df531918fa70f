"""Fail points: what the variable says, and that the code has the points that the list has."""

import re
import signal

import pytest

from runtime.errors import UsageError
from runtime.failpoints import POINTS, Armed, read
from sandbox.client import PROJECT


@pytest.mark.parametrize(
    ("text", "armed"),
    [
        ("recorded", Armed("recorded")),
        ("recorded:3", Armed("recorded", 3)),
        ("recorded:pause", Armed("recorded", 1, signal.SIGSTOP)),
        ("end-held:2:kill", Armed("end-held", 2, signal.SIGKILL)),
    ],
)
def test_the_variable_is_read(text: str, armed: Armed) -> None:
    assert read(text) == armed


@pytest.mark.parametrize(
    "text", ["", "nowhere", "recorded:0", "recorded:x", "recorded:1:stop", "recorded:1:kill:2", ":1"]
)
def test_what_is_wrong_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="TWICESHY_FAILPOINT"):
        read(text)


def test_every_point_is_in_the_code_and_no_other() -> None:
    found: set[str] = set()
    for folder in ("proxy", "runtime"):
        for path in (PROJECT / folder).rglob("*.py"):
            found |= set(re.findall(r'reach(?:\(|, )"([a-z-]+)"', path.read_text("utf-8")))
    assert found == set(POINTS)
