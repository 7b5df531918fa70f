"""Two ``twiceshy run`` at once, as on a machine where nothing was set up: one keeper, and its embedded Postgres."""

import signal
import sys

from bench.crashes import AGENT, PATIENCE
from sandbox.client import PROJECT
from sandbox.stage import Program, Stage, kill


def test_ctrl_c_the_first_and_sigkill_the_keeper() -> None:
    """The second finishes, the first can go on, and nothing is done twice. At the end nothing is left."""
    with Stage() as stage:
        sandbox = stage.sandbox("sandbox")
        home = str(stage.folder / "state")
        lingering = stage.folder / "lingers"
        lingering.touch()

        def run(name: str) -> Program:
            command = (sys.executable, "-m", "proxy.cli", "run", "--run", name, "--", sys.executable, AGENT)
            return stage.start(
                command, lambda _: None, TWICESHY_HOME=home, SANDBOX_URL=sandbox.url,
                TWICESHY_CONFIG=str(PROJECT / "sandbox" / "routes.toml"), AGENT_LINGER=f"4:{lingering}",
            )  # fmt: skip

        def ordered(program: Program, times: int = 1) -> bool:
            if program.process.poll() is not None:
                raise AssertionError(program.lines)
            return sum(line.startswith("4 order") for line in list(program.lines)) == times

        def running(*words: str) -> list[int]:
            return stage.running(home, *words)

        first, second = run("first"), run("second")
        sandbox.wait_for(lambda: ordered(first) and ordered(second), timeout=120, what="both have ordered")
        assert len(running("-m", "runtime.keeper")) == len(running("-m", "proxy.sidecar")) == 1

        first.process.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE) == 130, first.lines
        kill(stage.find(home, "-m", "runtime.keeper"))
        # The sidecar dies a moment after its keeper, and a model call sent in that moment would be made once more.
        sandbox.wait_for(lambda: ordered(second, 2), timeout=120, what="the second is where it was, by a new sidecar")
        lingering.unlink()
        assert second.wait(PATIENCE) == 0, second.lines
        assert sandbox.counts() == {"llm": 5, "orders": 2, "email": 1}

        again = run("first")
        assert again.wait(PATIENCE) == 0, again.lines
        assert sandbox.counts() == {"llm": 6, "orders": 2, "email": 2}
        stage.wait_until(lambda: not running("-m") and not running("-D"), "keeper, sidecar and Postgres have ended")
