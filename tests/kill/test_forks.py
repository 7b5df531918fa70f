"""A run is forked: what it had before the step is not made again, the rest is, under keys of its own."""

import json

import pytest

from tests.kill.launchers import Bench

STEPS = """
def own(path, body):
    request = urllib.request.Request("http://twiceshy.internal" + path, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
chosen = own("/random", {})["random"]
order(1)
mail()
permit = own("/steps", {"name": "embed"})
if "finish" in permit:
    with open(HERE + "/embedded", "a") as file: file.write("x")
    request = urllib.request.Request(permit["finish"], b'{"output": 1}', method="PUT")
    urllib.request.urlopen(request).close()
order(2)
mail()
urllib.request.urlopen(urllib.request.Request(
    "http://twiceshy.internal/result", json.dumps(chosen).encode(), method="PUT")).close()
"""


@pytest.mark.check_all
def test_what_was_done_before_the_step_is_not_done_again(bench: Bench) -> None:
    bench.agent(STEPS)
    source, fork = bench.run_id, f"{bench.run_id}-fork"
    assert bench.run()[0] == 0
    assert bench.verb("fork", source, "--before", "5", "--preview").stdout.splitlines() == [
        "1  replayed  value random",
        f"2  replayed  POST {bench.sandbox.url}/orders",
        f"3  replayed  POST {bench.sandbox.url}/email/send",
        "4  replayed  local embed",
        f"5  anew      POST {bench.sandbox.url}/orders",
        f"6  anew      POST {bench.sandbox.url}/email/send",
    ]
    made = json.loads(bench.verb("fork", source, "--before", "5", "--run", fork, "--json").stdout)
    assert (made["run"], made["forked_from"], len(made["replayed"]), len(made["sent"])) == (fork, source, 4, 2)
    assert bench.run(run=fork)[0] == 0
    orders = [each.key for each in bench.sandbox.effects("orders")[-3:]]
    assert len(set(orders)) == 3  # of the source 1 and 2, of the fork 2, and no key twice
    assert (bench.made("orders"), bench.made("email")) == (3, 3)
    assert (bench.folder / "embedded").read_text() == "x"
    results = bench.world.fetch("SELECT result FROM twiceshy.run WHERE id = ANY($1)", [source, fork])
    assert results[0] == results[1]
    report = bench.world.fetch("SELECT tape FROM twiceshy.attempt WHERE run_id = $1", fork)[0]["tape"]
    assert (json.loads(report)["replayed"], json.loads(report)["live"]) == (4, 2)
    shown = bench.verb("fork", source, "--before", "9", "--json")
    assert shown.returncode == 2
    assert "before one of 1 to 7, not 9" in shown.stderr
