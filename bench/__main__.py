"""``make bench``: the overhead against direct calls, and how long claims take; the figures go to bench/RESULTS.md."""

import asyncio
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from bench import claims, overhead

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    """Measure, print, write down with the commit that it ran on."""
    report, claimed = asyncio.run(overhead.main()), asyncio.run(claims.main())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    RESULTS.write_text(
        f"# Measured\n\n{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip() or 'unknown'}, "
        f"Python {platform.python_version()}, `make bench`. Agent, stub, sidecar and Postgres share the machine; "
        f"quote ratios of one run.\n\n## bench.overhead\n\n{report}\n\n"
        f"## bench.claims\n\n{claimed}\n"
    )


if __name__ == "__main__":
    main()
