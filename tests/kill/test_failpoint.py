"""``TWICESHY_FAILPOINT=… twiceshy run``: the first sidecar dies where it is told, the one after it does not."""

import sys

import pytest

from bench.crashes import AGENT, PATIENCE
from sandbox.client import PROJECT
from sandbox.stage import Stage


@pytest.mark.parametrize("point", ["recorded:2", pytest.param("end-held:3", marks=pytest.mark.check_all)])
def test_a_sidecar_dies_once(dsn: str, point: str) -> None:
    with Stage() as stage:
        sandbox = stage.sandbox("sandbox")
        program = stage.start(
            (sys.executable, "-m", "proxy.cli", "run", "--run", "r", "--", sys.executable, AGENT), lambda _: None,
            TWICESHY_HOME=str(stage.folder / "state"), TWICESHY_CONFIG=str(PROJECT / "sandbox" / "routes.toml"),
            DATABASE_URL=dsn, SANDBOX_URL=sandbox.url, TWICESHY_FAILPOINT=point,
        )  # fmt: skip
        assert program.wait(PATIENCE) == 0, program.lines
        assert any("2 attempts" in line for line in program.lines), program.lines
        counts = sandbox.counts()
        assert counts.pop("llm") == (3 if point.startswith("recorded") else 4)
        assert counts == {"orders": 1, "email": 1}


def test_a_point_that_is_none_is_said_at_once(dsn: str) -> None:
    with Stage() as stage:
        program = stage.start(
            (sys.executable, "-m", "proxy.cli", "run", "--run", "r", "--", "true"), lambda _: None,
            TWICESHY_HOME=str(stage.folder / "state"), DATABASE_URL=dsn, TWICESHY_FAILPOINT="nowhere",
        )  # fmt: skip
        assert program.wait(PATIENCE) == 2, program.lines
        assert "there is no point 'nowhere'" in "\n".join(program.lines)
