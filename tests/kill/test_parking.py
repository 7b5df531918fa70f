"""A run that only waits holds no process: it parks, and its launcher starts the agent again when it is due."""

import json
import signal
import stat

import pytest

from runtime import approvals, events
from runtime.entries import Decision
from tests.apart import ask_database
from tests.kill.launchers import Bench, until

#: What bash agents below begin with. -f: a refusal is a failure, and ends the script (-e).
SHELL = """#!/bin/bash
set -e
own() { curl -sS -f -X POST "http://twiceshy.internal$1" ${2:+-d "$2"}; }
order() {
    curl -sS -f "$SANDBOX_URL/orders" -H 'Content-Type: application/json' \\
        -d "{\\"lines\\": [{\\"sku\\": \\"rice\\", \\"count\\": $1}], \\"total\\": $1}"
}
echo x >> "$HERE/starts"
"""


OWN = """
import concurrent.futures
def own(path, body=None):
    request = urllib.request.Request('http://twiceshy.internal' + path, json.dumps(body or {}).encode(), method='POST')
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
"""
MANY = """
with concurrent.futures.ThreadPoolExecutor(50) as threads:
    list(threads.map(lambda n: own(f'/events/e{n}/wait'), range(1, 51)))
"""

WORLD = {"hold": "0.2", "park_quiet": "0.4", "mode": "durable"}


def in_bash(bench: Bench, body: str) -> list[str]:
    bench.program.write_text(SHELL + body)
    bench.program.chmod(bench.program.stat().st_mode | stat.S_IXUSR)
    return ["bash", str(bench.program)]


def parked(bench: Bench) -> None:
    """Wait until the run is parked and no process of its agent is left."""
    until(lambda: status(bench) == "parked" and not bench.agents(), "the run is parked")


def status(bench: Bench) -> str | None:
    found = bench.world.fetch("SELECT status FROM twiceshy.run WHERE id = $1", bench.run_id)
    return found[0]["status"] if found else None


def waits_for(bench: Bench) -> int:
    """For how many events the parked run waits."""
    found = bench.world.fetch("SELECT cardinality(wake_on) AS count FROM twiceshy.run WHERE id = $1", bench.run_id)
    return (found[0]["count"] or 0) if found else 0


def send(bench: Bench, name: str) -> None:
    ask_database(bench.world.dsn, events.send, bench.run_id, name, b"null", limit=10)


def decide(bench: Bench, name: str) -> Decision:
    return ask_database(bench.world.dsn, approvals.decide, bench.run_id, name, "approve", by="ann")


def result(bench: Bench) -> object:
    return json.loads(bench.world.fetch("SELECT result FROM twiceshy.run WHERE id = $1", bench.run_id)[0]["result"])


REFUND = """
began=$(own /now)
own /sleep '{"seconds": 1}'
order 1
answer=$(own /approvals/manager/wait '{"timeout": 600, "request": {"lines": 2}}')
order 2
printf '{"began": %s, "answer": %s}' "$began" "$answer" | curl -sS -f -X PUT -d @- http://twiceshy.internal/result
"""


def test_curl_alone_sleeps_waits_for_an_approval_and_ends(bench: Bench) -> None:
    launcher = bench.launch(*in_bash(bench, REFUND))
    parked(bench)  # asleep
    until(lambda: bench.made("orders") == 1, "it has slept")
    parked(bench)  # waiting
    shown = bench.verb("show", bench.run_id).stdout
    assert "approval manager" in shown
    assert "parked: it waits until" in shown
    assert "or for the approval manager" in shown
    assert bench.verb("event", bench.run_id, "manager").returncode == 0
    assert status(bench) == "parked"  # no event is a decision
    decided = decide(bench, "manager")
    code, _, err = bench.end(launcher)
    assert (code, status(bench)) == (0, "done"), err
    said = result(bench)["answer"]["approval"]  # type: ignore[index]
    assert (said["id"], said["decision"], said["by"]) == (decided.id, "approve", "ann")
    assert bench.made("orders") == 2
    assert bench.outcomes == ["parked", "parked", "done"]


@pytest.mark.check_all
def test_it_is_killed_wherever_it_is(bench: Bench) -> None:
    command = in_bash(bench, REFUND)
    launcher = bench.launch(*command)
    until(bench.agents, "it runs")
    launcher.kill()
    launcher = bench.launch(*command)
    parked(bench)
    launcher.kill()
    launcher = bench.launch(*command)
    until(lambda: bench.made("orders") == 1, "it has slept")
    bench.world.fetch("SELECT pg_sleep(0.05)")
    for pid in bench.agents():
        bench.shell(f"kill -9 {pid}")
    parked(bench)
    launcher.kill()
    decided = decide(bench, "manager")
    assert status(bench) == "queued"
    code, _, err = bench.run(*command)
    assert (code, status(bench)) == (0, "done"), err
    assert bench.made("orders") == 2
    assert result(bench)["answer"]["approval"]["id"] == decided.id  # type: ignore[index]


@pytest.mark.check_all
def test_a_run_that_parks_fifty_times_is_not_out_of_attempts(bench: Bench) -> None:
    """Only the first attempt begins any step; max_attempts is 3."""
    bench.agent(OWN + MANY)
    launcher = bench.launch()
    for n in range(1, 51):
        # Each of them waits for all events that have not come.
        until(lambda left=51 - n: waits_for(bench) == left, f"park {n}")  # type: ignore[misc]
        send(bench, f"e{n}")
    assert bench.end(launcher)[0] == 0
    assert status(bench) == "done"
    assert bench.outcomes.count("parked") >= 50


def test_an_agent_that_swallows_the_refusal_is_not_done(bench: Bench) -> None:
    launcher = bench.launch(*in_bash(bench, "own /events/go/wait || true\nexit 0"))
    parked(bench)
    assert launcher.poll() is None
    bench.verb("event", bench.run_id, "go")
    assert bench.end(launcher)[0] == 0
    assert bench.outcomes == ["parked", "done"]


@pytest.mark.check_all
def test_no_wait_ends_and_control_c_is_resumable(bench: Bench) -> None:
    command = in_bash(bench, "own /events/go/wait")
    code, _, err = bench.run(*command, flags=("--no-wait",))
    assert code == 75
    assert "parked: it waits for the event go" in err
    code, _, err = bench.run(*command, flags=("--no-wait",))
    assert code == 75
    assert "is not started: it waits for the event go" in err
    launcher = bench.launch(*command)
    until(lambda: _waits(bench, launcher.pid), "it has the run")
    launcher.send_signal(signal.SIGINT)
    code, _, err = bench.end(launcher)
    assert code == 130
    assert "to go on" in err
    assert status(bench) == "parked"
    bench.verb("event", bench.run_id, "go")
    assert bench.run(*command)[0] == 0


def _waits(bench: Bench, pid: int) -> bool:
    lock = bench.world.home / "runs" / f"{bench.run_id}.lock"
    return lock.exists() and str(pid) in lock.read_text()


WORK = (
    OWN
    + """
with concurrent.futures.ThreadPoolExecutor() as threads:
    waiting = threads.submit(own, '/events/go/wait', {})
"""
)

LOCAL = """
    permit = own('/steps', {'name': 'index'})
    until('worked')
    if 'finish' in permit:
        urllib.request.urlopen(urllib.request.Request(permit['finish'], b'{"output": 1}', method='PUT')).close()
    waiting.result()
"""


@pytest.mark.check_all
@pytest.mark.parametrize("work", ["request", "processor", "local step"])
def test_nothing_parks_under_work(bench: Bench, work: str) -> None:
    if work == "request":
        bench.sandbox.fault(match={"path": "/orders"}, hold="order")
        bench.agent(WORK + "    order()\n    until('worked')\n    waiting.result()")
    elif work == "local step":
        bench.agent(WORK + LOCAL)
    else:
        bench.agent(WORK + "    while not os.path.exists(HERE + '/worked'): sum(range(1000))\n    waiting.result()")
    launcher = bench.launch()
    until(lambda: bench.world.fetch("SELECT FROM twiceshy.step WHERE run_id = $1", bench.run_id), "it waits")
    # Another one, which only waits, parks meanwhile.
    other = Bench(bench.world, bench.folder, bench.run_id + "-other")
    other.started = bench.started
    other.program = bench.folder / "other.sh"
    idle = other.launch(*in_bash(other, "own /events/go/wait"))
    parked(other)
    assert status(bench) == "running"
    if work == "request":
        bench.sandbox.release("order")
    bench.touch("worked")
    parked(bench)
    for each in (bench, other):
        assert bench.verb("event", each.run_id, "go").returncode == 0
    assert bench.end(launcher)[0] == 0
    assert bench.end(idle)[0] == 0
    assert bench.made("orders") == (1 if work == "request" else 0)
