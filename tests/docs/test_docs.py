"""The docs say what there is: every setting, every refusal, every field of a rule, every verb."""

import argparse
import re
from pathlib import Path

from proxy import cli
from proxy.refusals import CODES
from proxy.routes import Route
from runtime.failpoints import POINTS
from runtime.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_setting_is_documented_with_its_default() -> None:
    assert settings_page() == (DOCS / "settings.md").read_text("utf-8"), "run: python -m tests.docs.test_docs"


def test_every_refusal_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {code: status for code, (status, _) in CODES.items()}


def test_every_field_of_a_rule_is_documented() -> None:
    text = (DOCS / "rules.md").read_text("utf-8")
    assert [name for name in Route.model_fields if f"| `{name}` |" not in text] == []


def test_every_verb_is_documented() -> None:
    text = "".join(page.read_text("utf-8") for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")))
    assert [verb for verb in verbs() if not re.search(rf"\btwiceshy {verb}\b", text)] == []


def test_every_option_of_doctor_is_documented() -> None:
    text = (DOCS / "doctor.md").read_text("utf-8")
    own = [action.option_strings[-1] for action in verbs()["doctor"]._actions
           if action.option_strings and not action.dest.startswith("setting_") and action.dest != "help"]  # fmt: skip
    assert [option for option in own if f"| `{option}" not in text] == []


def test_every_fail_point_is_documented() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", (DOCS / "operating.md").read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == POINTS


def verbs() -> dict[str, argparse.ArgumentParser]:
    """The verbs of the command line and their arguments."""
    [found] = [each for each in cli.parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found.choices)


def settings_page() -> str:
    """The page of settings, made from their class."""
    lines = [
        "# Settings",
        "",
        "`twiceshy.toml` (looked for from the working folder upwards, or named by `TWICESHY_CONFIG`), over it the",
        "environment (`TWICESHY_LEASE=10`), over both the flags of a command (`--lease 10`). Durations in seconds,",
        "sizes in bytes. `DATABASE_URL` names the database. `TWICESHY_HOME` places the state folder (locks, logs, the",
        "embedded database), which else is below `~/.local/state/twiceshy`, or for root below `/var/lib/twiceshy`.",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        text = f"{default:.12g}" if isinstance(default, float) else f"{default}"
        shown = "–" if default in (None, "", [], {}) else f"`{text}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page(), "utf-8")
