"""What the tests found out about each SDK, for the table in the docs. One file for each test, below ``build/``."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.sdks import Sdk
from tests.stack import PROJECT

FOUND = PROJECT / "build" / "sdk"


class Result:
    """Of one test of one SDK."""

    def __init__(self, version: str) -> None:
        self.facts: dict[str, Any] = {"version": version, "passed": False}

    def count(self, **counts: Any) -> None:
        self.facts |= counts


@contextlib.contextmanager
def note(test: str, sdk: Sdk) -> Iterator[Result]:
    """Write down how the block went, whether or not it fails. Skips the test of an SDK that is not installed."""
    result = Result(installed(sdk))
    try:
        yield result
        result.facts["passed"] = True
    finally:
        path = FOUND / test / (slug(sdk.name) + ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"name": sdk.name, **result.facts}) + "\n", "utf-8")


def installed(sdk: Sdk) -> str:
    """The version of *sdk*; skips the test where it is not installed."""
    try:
        return sdk.version()
    except LookupError as error:
        pytest.skip(str(error))


def slug(name: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in name)


def found(test: str, folder: Path = FOUND) -> dict[str, dict[str, Any]]:
    """The results of *test* that are there, by the SDK's name."""
    read = [json.loads(path.read_text("utf-8")) for path in sorted((folder / test).glob("*.json"))]
    return {each.pop("name"): each for each in read}
