"""Tiers of tests: which ones `make test` leaves out, and says so; and how property tests are judged.

A test marked with a tier runs with ``--tier NAME`` (or ``--tier all``), or when ``-m`` names the tier.
What a tier is for is said once, with its marker in pyproject.toml.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIERS = ("check_all", "proof")
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--tier``."""
    parser.addoption(
        "--tier", action="append", default=[], choices=[*TIERS, "all"], help="run the tests of this tier too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is left out yet; and property tests have their profile.

    They are judged by what they find, not by how fast a shared machine runs them. What decides on a change tries the
    same examples everywhere; the tiers look for new ones.
    """
    config.stash[LEFT_OUT] = {}
    settings.register_profile(
        "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True,
        derandomize=not config.getoption("tier"),
    )  # fmt: skip
    settings.load_profile("house")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose tier nobody asked for."""
    asked, expression = config.getoption("tier"), config.getoption("markexpr")
    unasked = [tier for tier in TIERS if "all" not in asked and tier not in asked and tier not in expression]
    tiers = [next((tier for tier in unasked if item.get_closest_marker(tier)), None) for item in items]
    left = [item for item, tier in zip(items, tiers, strict=True) if tier]
    if left:
        config.stash[LEFT_OUT] = dict(Counter(tier for tier in tiers if tier))
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, tier in zip(items, tiers, strict=True) if not tier]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the controller, if this is a worker of it: only workers collect."""
    report: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if report is not None:
        report["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the word of one worker: all of them collect the same tests."""
    if error is None:
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out and why."""
    reasons = dict(line.split(": ", 1) for line in config.getini("markers") if line.split(":")[0] in TIERS)
    for tier, count in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"left out: {count} × {tier}: {reasons[tier]}")
