"""The example agents that are written with SDKs: SIGKILLed after each step and inside each call, and nothing differs.

They run as they are, over TLS. Judged by what the sandbox received, against a run that nobody disturbed.
"""

import os
import signal
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from sandbox.client import Received
from tests.kill.launchers import until
from tests.sdk.place import Came, Place, Stage, hold, restarts
from tests.sdk.sdks import OPENAI, Sdk
from tests.stack import PROJECT

HERE = PROJECT / "sandbox" / "agents"
SUPPORT = Sdk("support agent", "stripe", str(HERE / "support.py"), OPENAI, ("A-1001",))
RESEARCH = Sdk("research agent", "aiohttp", str(HERE / "research.py"), OPENAI, ("tea in Europe",))

#: What starts the agent: it lingers after the step that a file names, and what it says goes into another.
LINGERING = 'AGENT_LINGER="$(cat "$HERE/linger")" exec "$@" >> "$HERE/said"'


def undisturbed(place: Place, agent: Sdk, folder: Path) -> tuple[int, Came]:
    with place.stage(agent, folder / "undisturbed") as stage:
        whole = stage.came(stage.start())
        assert stage.outcomes == ["done"]
        return stage.sandbox.port, whole


def hold_call(stage: Stage, calls: list[Received], n: int, gate: str) -> None:
    """Hold the *n*-th of *calls* (from 0); searches are made at once, and told by what they look for."""
    if calls[n].path == "/search":
        stage.sandbox.fault(match={"query": calls[n].target.partition("?")[2]}, hold=gate)
    else:
        stage.sandbox.fault(**hold(calls, n, gate))


def wait_said(path: Path, line: str) -> None:
    until(lambda: path.exists() and f"{line}\n" in path.read_text("utf-8"), f"it says {line!r}")


@pytest.mark.check_all
@pytest.mark.parametrize("agent", [SUPPORT, RESEARCH], ids=lambda agent: str(agent.name))
def test_killed_after_each_step(place: Place, tmp_path: Path, agent: Sdk) -> None:
    port, whole = undisturbed(place, agent, tmp_path)
    steps = [line for line in whole.lines if line[0].isdigit()]
    assert len(steps) == (6 if agent is SUPPORT else 4)
    with place.stage(agent, tmp_path / "after", port) as stage:
        linger, said = stage.folder / "linger", stage.folder / "said"
        linger.write_text(f"1:{stage.folder}")
        given = [f"{name}={value}" for name, value in agent.given(stage.sandbox.url).items()]
        command = ["env", *given, "sh", "-c", LINGERING, "sh", *agent.command(), str(stage.folder)]
        launcher = stage.launch(*command)
        for n, step in enumerate(steps, 1):
            wait_said(said, step)
            linger.write_text(f"{n + 1}:{stage.folder}")
            stage.kill()
        came = stage.came(launcher)
        assert stage.outcomes == [*["died"] * len(steps), "done"]
        assert restarts(said.read_text().splitlines(), whole.lines) == len(steps) + 1
        assert (came.effects, came.asked) == (whole.effects, whole.asked)


@pytest.mark.check_all
@pytest.mark.parametrize("agent", [SUPPORT, RESEARCH], ids=lambda agent: str(agent.name))
def test_killed_inside_each_call(place: Place, tmp_path: Path, agent: Sdk) -> None:
    port, whole = undisturbed(place, agent, tmp_path)
    assert len(whole.calls) == 6
    for n in range(len(whole.calls)):
        with place.stage(agent, tmp_path / f"inside-{n}", port) as stage:
            hold_call(stage, whole.calls, n, "call")
            launcher = stage.start()
            stage.sandbox.wait_held("call")
            stage.wait_asked(stage.kill(), n + 1)
            stage.sandbox.release("call")
            came = stage.came(launcher)
            assert stage.outcomes == ["died", "done"], n
            assert restarts(came.lines, whole.lines) >= 1
            assert (came.effects, came.asked) == (whole.effects, whole.asked), n


def test_killed_while_three_searches_are_out(place: Place, tmp_path: Path) -> None:
    with place.stage(RESEARCH, tmp_path / "searching") as stage:
        stage.sandbox.fault(match={"path": "/search"}, times=3, hold="search")
        launcher = stage.start()
        stage.sandbox.wait_held("search", 3)
        stage.kill()
        came = stage.came(launcher)
        assert stage.outcomes == ["died", "done"]
        assert stage.sandbox.counts() == {"llm": 2, "email": 1}
        asked = [parse_qs(each.target.partition("?")[2])["q"][0] for each in came.calls if each.path == "/search"]
        # Reads, of which no answer had come: made again.
        assert sorted(asked) == sorted(2 * [f"tea in Europe {what}" for what in ("history", "in numbers", "criticism")])


HALF = """
import os, pathlib, sys
from openai import OpenAI
text = ""
try:
    ask = [{"role": "user", "content": "hello"}]
    for event in OpenAI().chat.completions.create(model="m", messages=ask, stream=True):
        text += event.choices[0].delta.content or ""
        pathlib.Path(os.environ["HERE"], "heard").touch()
except Exception as error:
    sys.exit(f"{type(error).__name__} after {len(text)} characters")
print(text)
"""


@pytest.mark.parametrize(
    "how",
    [pytest.param({}, id="cut", marks=pytest.mark.check_all), pytest.param({"clean": True}, id="cut with a clean end")],
)
def test_openais_sdk_gives_no_half_text(place: Place, tmp_path: Path, how: dict[str, bool]) -> None:
    program = tmp_path / "half.py"
    program.write_text(HALF)
    with place.stage(Sdk("half", "openai", str(program), OPENAI), tmp_path / "run") as stage:
        # Cut when the agent has been given the beginning; before that the sidecar would ask again by itself.
        stage.sandbox.fault(match={"service": "llm"}, drop="mid", cut_at=5, hold_events={5: "cut"}, **how)
        launcher = stage.start()
        stage.sandbox.wait_held("cut")
        until((stage.folder / "heard").exists, "the agent has the beginning")
        stage.sandbox.release("cut")
        came = stage.came(launcher)
        assert stage.outcomes == ["failed", "done"]
        assert len(came.lines) == 1
        assert came.lines[0].endswith(".")
        assert len(came.lines[0].split()) == 24
        assert stage.sandbox.counts() == {"llm": 2}


def test_one_refund_though_agent_and_sidecar_die_after_it(place: Place, tmp_path: Path) -> None:
    with place.stage(SUPPORT, tmp_path / "both") as stage:
        stage.sandbox.fault(match={"service": "payments"}, hold="refund")
        launcher = stage.start()
        stage.sandbox.wait_held("refund")
        stage.kill()
        os.kill(place.world.sidecar, signal.SIGKILL)
        until(lambda: any(each.gone for each in stage.sandbox.requests("payments")), "the sidecar's connection is gone")
        stage.sandbox.release("refund")
        came = stage.came(launcher)
        assert len(stage.outcomes) == 2
        assert stage.sandbox.counts() == {"llm": 2, "payments": 1, "crm": 1, "email": 1}
        refunds = [each for each in came.calls if each.service == "payments"]
        assert len(refunds) == 2
        assert len({each.header("idempotency-key") for each in refunds}) == 1
