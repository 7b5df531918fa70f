"""``python -m tests.sdk.table``: takes what the last `make check-all` found, and writes docs/clients.md from it.

What was found stands in results.json beside this file. SDKs that were not tried this time keep what was found before;
those that are no longer in the table go.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.sdk.results import FOUND, found
from tests.sdk.sdks import SDKS, UNREACHED, Sdk
from tests.stack import PROJECT

RESULTS = Path(__file__).with_name("results.json")
PAGE = PROJECT / "docs" / "clients.md"
TESTS = ("kills", "refusals")

Results = dict[str, dict[str, dict[str, Any]]]

HEAD = """\
# Clients

<!-- Written by `python -m tests.sdk.table` from what `make check-all` found. -->

Programs of a few lines with each of these, as anybody would write them (`tests/sdk/programs`), were run unchanged under
`twiceshy run` against stand-ins over TLS.

* **Killed**: by SIGKILL after each thing that the program got, and inside each of its calls, streams in their middle.
  Everything that the upstream did and everything that the program printed at last was equal to that of a run which
  nobody disturbed.
* **Refused**: by each of {refusals}.
  Every one was tried once and not again. What its user sees is the whole *message*, or, with clients that show no body
  by themselves, the *reason* phrase (the message is in the body).

| client | version | speaks HTTP by | what you do | killed after, inside | refused | shows |
| --- | --- | --- | --- | --- | --- | --- |
"""

BEHIND = """
Some ask again by themselves. PyGithub (eleven tries) and slack_sdk (two) were tried with an upstream that does what it
is asked, and then says 502 or nothing: it was done once, and a person was asked. openai with a time limit of 1 s (three
tries) got the answer that took 3 s, from one call.

openai-agents was tried without its tracing, which passes and is not journalled, as telemetry does; litellm without its
look-up of prices when it is imported (`LITELLM_LOCAL_MODEL_COST_MAP`).

## Not reached

{unreached}
More of what goes past the sidecar, and what to do about it: [https.md](https.md#what-is-not-reached).
"""


def load() -> Results:
    """What was found, by test and SDK."""
    results: Results = json.loads(RESULTS.read_text("utf-8"))
    return results


def merged(old: Results, fresh: Results) -> Results:
    """*fresh* over *old*, of what is in the table, in its order."""
    both = {test: old.get(test, {}) | fresh.get(test, {}) for test in TESTS}
    return {test: {sdk.name: both[test][sdk.name] for sdk in SDKS if sdk.name in both[test]} for test in TESTS}


def page(results: Results) -> str:
    """The page of clients."""
    codes = [each for facts in results["refusals"].values() for each in facts["refusals"]]
    named = ", ".join(f"`{code}`" for code in dict.fromkeys(codes))
    lines = [_line(sdk, results) for sdk in SDKS]
    unreached = "".join(f"* {what}: {why}\n" for what, why in UNREACHED.items())
    return HEAD.format(refusals=named) + "".join(lines) + BEHIND.format(unreached=unreached)


def _line(sdk: Sdk, results: Results) -> str:
    kills, refusals = (results[test].get(sdk.name) for test in TESTS)
    killed = refused = "not tried"
    if kills is not None:
        killed = f"{kills['after']}, {kills['inside']}" if kills["passed"] else "**failed**"
    if refusals is not None:
        refused = f"{len(refusals['refusals'])}" if refusals["passed"] else "**failed**"
    version = (kills or refusals or {}).get("version", "–")
    if sdk.package in ("python", "node"):
        version = f"{sdk.package.capitalize()} {version}"
    return f"| {sdk.name} | {version} | {sdk.stack or 'itself'} | {sdk.needs} | {killed} | {refused} | {sdk.words} |\n"


def dumped(results: Results) -> str:
    """*results* as JSON, a line for each SDK."""
    parts = []
    for test, facts in results.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in facts.items()]
        parts.append(f" {json.dumps(test)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    fresh = {test: found(test) for test in TESTS}
    if not any(fresh.values()):
        sys.exit(f"nothing was found in {FOUND}: run `make check-all ARGS=tests/sdk` first")
    results = merged(load() if RESULTS.exists() else {}, fresh)
    RESULTS.write_text(dumped(results), "utf-8")
    PAGE.write_text(page(results), "utf-8")


if __name__ == "__main__":
    main()
