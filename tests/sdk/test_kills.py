"""Every SDK, unchanged, over TLS: SIGKILLed after each step and inside each call, and nothing differs.

Judged by what its program printed and by what the sandbox received, against a run that nobody disturbed.
"""

from pathlib import Path

import pytest

from tests.sdk.place import Came, Place, hold, restarts
from tests.sdk.results import installed, note
from tests.sdk.sdks import QUICK, SDKS, Sdk, each


@pytest.mark.check_all
@each(sdk for sdk in SDKS if not sdk.alone)
def test_killed_everywhere(sdk: Sdk, place: Place, tmp_path: Path) -> None:
    with note("kills", sdk) as result:
        port, whole = undisturbed(place, sdk, tmp_path)
        result.count(after=len(whole.lines), inside=len(whole.calls))
        killed_after_each_step(place, sdk, tmp_path, port, whole)
        killed_inside_each_call(place, sdk, tmp_path, port, whole)


@QUICK
def test_killed_inside_each_call(sdk: Sdk, place: Place, tmp_path: Path) -> None:
    installed(sdk)
    port, whole = undisturbed(place, sdk, tmp_path)
    killed_inside_each_call(place, sdk, tmp_path, port, whole)


def undisturbed(place: Place, sdk: Sdk, folder: Path) -> tuple[int, Came]:
    with place.stage(sdk, folder / "undisturbed") as stage:
        whole = stage.came(stage.start())
        assert stage.outcomes == ["done"]
        assert len(whole.lines) >= 2
        assert whole.effects
        return stage.sandbox.port, whole


def killed_after_each_step(place: Place, sdk: Sdk, folder: Path, port: int, whole: Came) -> None:
    with place.stage(sdk, folder / "after", port) as stage:
        came = stage.came(stage.start(DIES="1"))
        steps = len(whole.lines)
        assert stage.outcomes == [*["died"] * steps, "done"]
        assert came.lines == [line for n in range(1, steps + 1) for line in whole.lines[:n]] + whole.lines
        assert came.effects == whole.effects
        assert came.asked == whole.asked


def killed_inside_each_call(place: Place, sdk: Sdk, folder: Path, port: int, whole: Came) -> None:
    with place.stage(sdk, folder / "inside", port) as stage:
        gates = [f"call-{n}" for n in range(len(whole.calls))]
        stage.sandbox.faults(*[hold(whole.calls, n, gate) for n, gate in enumerate(gates)])
        launcher = stage.start()
        for n, gate in enumerate(gates):
            stage.wait_held(gate)
            killed = stage.kill()
            stage.wait_asked(killed, n + 1)
            stage.sandbox.release(gate)
        came = stage.came(launcher)
        assert stage.outcomes == [*["died"] * len(gates), "done"]
        restarts(came.lines, whole.lines)
        assert came.effects == whole.effects
        assert came.asked == whole.asked
