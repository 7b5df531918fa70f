"""The kill tests find what they are there for: an intent that is written after the request was sent."""

import shutil
from pathlib import Path

import pytest

from bench.crashes import SIDECAR, Cell, Crashes, Mode, Moment, faults
from sandbox.client import PROJECT
from sandbox.stage import Stage

#: The worst step to be unsure of: the e-mail, which has no key.
CELL = Cell(Mode.DURABLE, Moment.BOTH, 6)
PACKAGES = ("proxy", "runtime", "twiceshy")
RECORDER = "proxy/recorder.py"
#: The intent moves from before the conversation with the upstream to after it.
BUG = {
    "not await self._intend()": "False",
    "    async def _record_whole(self)": (
        "    async def _record_whole(self):\n"
        "        if self._journalled and self.effect is not Effect.READ:\n"
        "            await self._intend()\n"
        "        return await self._record_late()\n"
        "\n"
        "    async def _record_late(self)"
    ),
}


def copy(to: Path) -> Path:
    """The packages that run, in a folder of their own."""
    for name in PACKAGES:
        shutil.copytree(PROJECT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", to)
    return to


def plant(root: Path) -> None:
    """Let the request go out first, and the intent be written when its answer is here."""
    path = root / RECORDER
    text = path.read_text()
    for right, wrong in BUG.items():
        assert text.count(right) == 1, f"{RECORDER} has changed, and the bug must be planted otherwise: {right!r}"
        text = text.replace(right, wrong)
    path.write_text(text)


@pytest.mark.parametrize(
    "planted",
    [pytest.param(False, id="as it is", marks=pytest.mark.check_all), pytest.param(True, id="intent after send")],
)
def test_an_intent_after_the_send_is_found(dsn: str, planted: bool) -> None:
    with Stage() as stage:
        root = copy(stage.folder / "copy")
        if planted:
            plant(root)
        crashes = Crashes(stage, CELL.mode, root=root, DATABASE_URL=dsn)
        crashes.ready()
        sidecars = stage.running(str(crashes.home), *SIDECAR)
        assert [Path(f"/proc/{pid}/cwd").readlink() for pid in sidecars] == [root], "the sidecar is not the copy"
        seen = crashes.play(CELL.moment, CELL.step)
    if planted:
        assert seen.counts["email"] == 2, seen
        assert faults(CELL, seen)
    else:
        assert not faults(CELL, seen), "\n".join(seen.said)
