"""The watch over the type checker: it fails unless each planted error is found on its line, and no other.

A checker that finds nothing looks just like code without faults. ``make check`` runs this after it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path("tests/canary/planted.py")

Found = set[tuple[int, str]]


def planted(source: str) -> Found:
    """Line and error code of each error that was planted in *source*."""
    marks = (re.search(r"# planted: ([a-z-]+)$", line) for line in source.splitlines())
    return {(number, mark.group(1)) for number, mark in enumerate(marks, 1) if mark}


def reported(output: str) -> Found:
    """Line and error code of each error that mypy reported."""
    errors = re.finditer(r"^[^:\n]+:(\d+): error: .*\[([a-z-]+)\]$", output, re.MULTILINE)
    return {(int(error[1]), error[2]) for error in errors}


def faults(source: str, output: str) -> list[str]:
    """What is wrong with the checker, a line each; nothing when it found what was planted and only that."""
    wanted, found = planted(source), reported(output)
    return [
        *(f"{PLANTED}:{line}: the checker did not find [{code}]" for line, code in sorted(wanted - found)),
        *(f"{PLANTED}:{line}: nobody planted [{code}] here" for line, code in sorted(found - wanted)),
    ]


def main() -> int:
    """Run the checker as ``make check`` does, over the planted file alone."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context", str(PLANTED)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    source = (ROOT / PLANTED).read_text("utf-8")
    wrong = faults(source, run.stdout)
    if wrong:
        print(*wrong, run.stdout, run.stderr, sep="\n", file=sys.stderr)
        return 1
    print(f"Canary: the checker found all {len(planted(source))} planted errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
