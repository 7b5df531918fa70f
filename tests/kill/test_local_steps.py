"""Local steps of real agents: one that hangs is ended, one that kills its process is not begun for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill.launchers import Bench, until
from tests.kill.works import Works
from tests.stack import PROJECT

STEP = """
import signal
def ask(method, url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), method=method)
    with urllib.request.urlopen(request) as answer:
        return answer.status, json.loads(answer.read() or b"null")
def begin(**policy):
    return ask("POST", "http://twiceshy.internal/steps", {"name": "embed", **policy})
"""


def test_a_hanging_step_is_ended_and_goes_on_from_its_progress(bench: Bench) -> None:
    bench.agent(STEP + """
order(1)
status, permit = begin(heartbeat_timeout=1)
if turn == 1:
    ask("POST", permit["finish"] + "/heartbeat", {"progress": {"page": 7}})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(10)
assert permit["progress"] == {"page": 7} and permit["try"] == 2, permit
ask("PUT", permit["finish"], {"output": 1})
order(2)
""")  # fmt: skip
    code, _, err = bench.run()
    assert code == 0, err
    assert "was not heard of for heartbeat_timeout = 1 s; again at once" in err
    assert "taken the run over" not in err
    assert (bench.starts, bench.outcomes, bench.made("orders")) == (2, ["failed", "done"], 2)


@pytest.mark.check_all
def test_a_step_that_kills_its_process_ends_before_its_run_does(bench: Bench) -> None:
    bench.agent(STEP + """
status, said = begin(max_tries=2)
if status == 201: os.kill(os.getpid(), signal.SIGKILL)
assert "max_tries = 2" in said["error"], said
order(1)
""")  # fmt: skip
    code, _, err = bench.run()
    assert code == 0, err
    assert (bench.starts, bench.outcomes, bench.made("orders")) == (3, ["died", "died", "done"], 1)


@pytest.mark.check_all
def test_a_step_that_hangs_each_time_fails_its_run(bench: Bench) -> None:
    bench.agent(STEP + """
begin(timeout=0.5)
while True: time.sleep(10)
""")  # fmt: skip
    code, _, err = bench.run()
    assert code == 1
    assert "3 attempts in a row brought no new step (max_attempts = 3)" in err
    assert "timeout = 0.5 s" in err
    until(lambda: not bench.agents(), "no agent is left")


def test_a_retried_run_goes_on_from_the_step_that_failed(bench: Bench) -> None:
    bench.agent("""
import twiceshy
def pack(n):
    if not os.path.exists(HERE + "/mended"): raise ValueError("no tape")
    return n
order(1)
try: twiceshy.step("label", pack, 0, max_tries=1)
except twiceshy.StepFailed: order(2)
assert twiceshy.step("pack", pack, 1, max_tries=1) == 1
order(3)
""")
    code, _, err = bench.run()
    assert code == 1
    assert "no tape" in err
    bench.touch("mended")
    retried = bench.verb("retry", bench.run_id)
    assert retried.returncode == 0, retried.stderr
    code, _, err = bench.run()
    assert code == 0, err
    assert bench.made("orders") == 3  # what was done about the first one that failed was not undone


TRANSACTION = """
import asyncio, json, os, urllib.request
import asyncpg
async def main():
    asked = b'{"name": "pay", "transaction": true}'
    with urllib.request.urlopen("http://twiceshy.internal/steps", asked) as answer:
        permit = json.load(answer)
    connection = await asyncpg.connect(os.environ["TWICESHY_DATABASE_URL"])
    await connection.execute("CREATE SCHEMA shop; CREATE TABLE shop.paid (id int)")
    async with connection.transaction():
        await connection.execute("INSERT INTO shop.paid VALUES (1)")
        given = permit["run"], permit["token"], permit["step"], "1"
        await connection.execute("SELECT twiceshy.record_step($1, $2, $3, $4)", *given)
    with urllib.request.urlopen(permit["finish"]) as answer:
        assert json.load(answer) == {"output": 1}
    print(await connection.fetchval("SELECT count(*) FROM shop.paid"))
asyncio.run(main())
"""


@pytest.mark.check_all
def test_the_embedded_database_is_there_for_transactions(home: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [sys.executable, "-m", "proxy.cli", "run", "--", sys.executable, "-c", TRANSACTION]
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


#: Fails where another process of the same program still runs.
ALONE = """
import fcntl
alone = open(HERE + "/alone", "w")
fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.mark.check_all
def test_no_other_worker_begins_before_the_hanging_agent_is_gone(works: Works) -> None:
    works.declare(STEP + ALONE + """
status, permit = begin(timeout=1)
if permit["try"] == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    while True: time.sleep(10)
ask("PUT", permit["finish"], {"output": 1})
""")  # fmt: skip
    [run] = works.queue("hangs")
    for _ in range(2):
        works.worker("--slots", "2")
    works.comes("done", run)
    assert works.world.outcomes(run) == ["failed", "done"]
    assert "took longer than timeout = 1 s; again" in works.said()
