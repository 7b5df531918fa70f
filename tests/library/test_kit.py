"""What an agent's Python finds on its path: the library, and nothing that could stand in for something of its own."""

import ast
import subprocess
import sys
from pathlib import Path

from proxy.kit import LIBRARY, lay_out


def test_it_needs_the_standard_library_only() -> None:
    found = set()
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    assert found - set(sys.stdlib_module_names) == {"twiceshy"}


def test_the_path_has_it_typed_and_nothing_else(tmp_path: Path) -> None:
    site = lay_out(tmp_path).site
    assert {path.name for path in site.iterdir()} == {"sitecustomize.py", "preload.cjs", "twiceshy"}
    assert (site / "twiceshy" / "py.typed").exists()
    environment = {"PYTHONPATH": str(site)}
    program = "import twiceshy, twiceshy.aio; print(twiceshy.__file__, twiceshy.step.__name__)"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{site}/twiceshy/__init__.py step\n", "")
