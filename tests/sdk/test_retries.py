"""SDKs that try again by themselves, against upstreams that did what was asked and did not say so."""

from pathlib import Path
from typing import Any

import pytest

from tests.sdk.place import Place, Stage
from tests.sdk.results import installed
from tests.sdk.sdks import OPENAI, Sdk, named

pytestmark = pytest.mark.check_all

IMPATIENT = Sdk("openai, 1 s", "openai", "openai_impatient.py", OPENAI)


def test_an_impatient_openai_joins_its_own_call(place: Place, tmp_path: Path) -> None:
    """Its retries, of which there are two after a time limit of 1 s each, find the call that is under way."""
    installed(IMPATIENT)
    with place.stage(IMPATIENT, tmp_path / "run") as stage:
        stage.sandbox.fault(match={"path": "/v1/chat/completions"}, delay=3.0)
        came = stage.came(stage.start())
        assert len(came.calls) == len(came.effects) == len(came.lines) == 1
        assert stage.outcomes == ["done"]


@pytest.mark.parametrize("fault", [{"status": 502, "after_effect": True}, {"drop": "after"}], ids=["502", "drop"])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("PyGithub", "/github/repos/ada/engine/issues"),
        ("slack_sdk", "/slack/chat.postMessage"),
        ("slack_sdk, async", "/slack/chat.postMessage"),
    ],
)
def test_done_and_not_said(name: str, path: str, fault: dict[str, Any], place: Place, tmp_path: Path) -> None:
    """PyGithub tries eleven times, slack_sdk twice after a lost connection: it is done once, and a person is asked."""
    installed(named(name))
    with place.stage(named(name), tmp_path / "run") as stage:
        stage.sandbox.fault(match={"path": path}, **fault)
        code, _, err = stage.end(stage.start())
        assert (code, hits(stage, path)) == (3, 1), err
        assert stage.world.status(stage.run_id) == "ambiguous"
        assert len(stage.sandbox.effects()) == 1


def hits(stage: Stage, path: str) -> int:
    return len(stage.sandbox.requests(method="POST", path=path))
