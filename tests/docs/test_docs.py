"""The docs say what there is: every setting, every refusal, every field of a rule."""

import re
from pathlib import Path

from proxy.refusals import CODES
from proxy.routes import Route
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


def settings_page() -> str:
    """The page of settings, made from their class."""
    lines = [
        "# Settings",
        "",
        "`twiceshy.toml` (looked for from the working folder upwards, or named by `TWICESHY_CONFIG`), over it the",
        "environment (`TWICESHY_LEASE=10`), over both the flags of a command (`--lease 10`). Durations in seconds,",
        "sizes in bytes. `TWICESHY_HOME` places the state folder, `DATABASE_URL` names the database.",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "–" if default in (None, "", []) else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page(), "utf-8")
