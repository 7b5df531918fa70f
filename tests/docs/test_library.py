"""The page of the library: what it shows is in an example agent, which is tested, or is run here."""

import re
from pathlib import Path

import twiceshy
from twiceshy import aio

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "library.md").read_text("utf-8")


def blocks() -> list[str]:
    """The page's code."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def programs() -> list[str]:
    """What is no part of an example: it is run (tests.library.test_page)."""
    examples = "\n".join(path.read_text("utf-8") for path in (PROJECT / "sandbox" / "agents").glob("*.py"))
    return [block for block in blocks() if block.strip("\n") not in examples]


def test_what_is_no_excerpt_is_a_program() -> None:
    assert [block.startswith("import twiceshy") for block in programs()] == [True] * 3
    assert len(blocks()) == 8


def test_every_name_is_documented() -> None:
    assert [name for name in twiceshy.__all__ if not re.search(rf"\b{name}\b", PAGE)] == []
    assert set(aio.__all__) < {*twiceshy.__all__}
