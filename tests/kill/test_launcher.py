"""The launcher with everything real: keeper, sidecar, Postgres, sandbox, and processes that are SIGKILLed.

One keeper and one sidecar serve the whole module; tests that kill them leave new ones behind.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from runtime import runs
from tests.apart import ask_database
from tests.kill.launchers import Bench, until

# ---- a run that goes well, and runs that have ended


def test_a_smooth_run_is_quiet_and_its_output_untouched(bench: Bench) -> None:
    bench.agent("order(); sys.stdout.write('out\\n'); sys.stderr.write('err\\n')")
    assert bench.run() == (0, "out\n", "err\n")
    assert bench.outcomes == ["done"]


def test_a_finished_run_prints_its_result_and_starts_nothing(bench: Bench) -> None:
    bench.agent(
        "request = urllib.request.Request('http://twiceshy.internal/result', b'{\"refund\": 50}', method='PUT')\n"
        "urllib.request.urlopen(request)"
    )
    assert bench.run()[0] == 0
    assert bench.run() == (0, '{"refund": 50}\n', "")
    assert bench.starts == 1


def test_a_failing_agent_goes_on_where_it_was(bench: Bench) -> None:
    bench.agent("order(1)\nif turn == 1: sys.exit(9)\norder(2)")
    code, _, err = bench.run()
    assert code == 0, err
    assert "the agent ended with exit code 9; again at once" in err
    assert "done · 2 attempts (failed) · 2 live, 1 replayed" in err
    assert bench.made("orders") == 2
    assert bench.outcomes == ["failed", "done"]


@pytest.mark.check_all
def test_one_that_gets_nowhere_is_given_up(bench: Bench) -> None:
    bench.agent("order()\nsys.exit(5)")
    code, _, err = bench.run()
    assert code == 1
    # The first attempt brought a step; the three after it did not.
    assert bench.starts == 4
    assert "3 attempts in a row brought no new step" in err
    again = bench.run()
    assert again[0] == 1
    assert "is not started: it is failed" in again[2]
    assert bench.starts == 4
    assert bench.made("orders") == 1


def test_what_cannot_be_started_is_a_fault_of_the_command(bench: Bench) -> None:
    code, _, err = bench.run("no-such-agent")
    assert (code, err) == (2, "twiceshy: cannot start 'no-such-agent': no such file or command\n")
    broken = bench.folder / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    code, _, err = bench.run(str(broken))
    assert code == 2
    assert "no such file or command" in err
    assert bench.outcomes == ["interrupted"]
    assert bench.world.status(bench.run_id) == "queued"


@pytest.mark.check_all
def test_each_attempt_reads_its_input_from_the_top(bench: Bench) -> None:
    bench.agent("text = sys.stdin.read()\nif turn < 3: sys.exit(1)\nprint(text)")
    (bench.folder / "input").write_text("skipped\nthe input")
    with (bench.folder / "input").open() as file:
        os.lseek(file.fileno(), 8, os.SEEK_SET)
        ran = subprocess.run(
            [sys.executable, "-m", "proxy.cli", "run", "--run", bench.run_id, "--", *bench.command],
            stdin=file, capture_output=True, text=True, timeout=60,
            env=bench.world.environment | {"HERE": str(bench.folder)},
        )  # fmt: skip
    assert ran.stdout == "the input\n"


# ---- deaths


def test_an_agent_killed_inside_a_call_joins_it(bench: Bench) -> None:
    bench.agent("open(HERE + '/pid', 'w').write(str(os.getpid()))\nprint(order()['id'])")
    bench.sandbox.fault(match={"path": "/orders"}, hold="order")
    process = bench.launch()
    bench.sandbox.wait_held("order")
    os.kill(int((bench.folder / "pid").read_text()), signal.SIGKILL)
    until(lambda: bench.starts == 2, "it is started again")
    bench.sandbox.release("order")
    code, _, err = bench.end(process)
    assert code == 0, err
    assert "the agent was killed by SIGKILL; again at once" in err
    assert "1 live, 0 replayed, 1 joined" in err or "1 live, 1 replayed, 0 joined" in err
    assert bench.made("orders") == 1
    assert bench.outcomes == ["died", "done"]


def test_a_killed_launcher_leaves_no_process_and_the_next_one_goes_on_at_once(bench: Bench) -> None:
    bench.agent("order(1)\nopen(HERE + '/on', 'w')\nif turn == 1: time.sleep(300)\norder(2)")
    process = bench.launch("sh", "-c", shlex.join(bench.command) + "; true")
    until((bench.folder / "on").exists, "the agent is at work")
    assert len(bench.agents()) == 2
    process.kill()
    process.wait()
    until(lambda: not bench.agents(), "the agent is gone")
    began = time.monotonic()
    assert bench.run()[0] == 0
    assert time.monotonic() - began < 25, "it did not wait for the lease (30 s)"
    assert bench.outcomes == ["died", "done"]
    assert bench.made("orders") == 2


def test_a_held_run_is_busy(bench: Bench) -> None:
    bench.agent("until('go')")
    process = bench.launch()
    until(lambda: bench.starts, "the agent is at work")
    code, out, err = bench.run()
    assert (code, out) == (75, "")
    assert f"run {bench.run_id} is being run by another twiceshy (pid {process.pid})" in err
    bench.touch("go")
    assert bench.end(process)[0] == 0
    assert bench.starts == 1


def test_a_run_that_somebody_else_holds_is_busy(bench: Bench) -> None:
    claimed = bench.verb("claim", bench.run_id)
    assert claimed.returncode == 0
    bench.agent("pass")
    code, _, err = bench.run()
    assert code == 75
    assert "is held by attempt 1 (claim on " in err
    assert bench.starts == 0


def test_an_agent_that_lost_its_run_is_ended(bench: Bench) -> None:
    bench.agent("time.sleep(300)")
    process = bench.launch(flags=("--lease", "0.9"))
    until(lambda: bench.starts, "the agent is at work")
    row = bench.world.fetch("SELECT host, folder FROM twiceshy.attempt WHERE run_id = $1", bench.run_id)[0]

    ask_database(
        bench.world.dsn, runs.claim, bench.run_id, kind="launcher", host=row["host"], folder=row["folder"], lease=30,
        proved_dead=True,
    )  # fmt: skip
    code, _, err = bench.end(process)
    assert code == 75
    assert "another attempt has taken the run over; this agent was ended" in err
    assert not bench.agents()


# ---- stops


def test_a_stop_ends_the_agent_that_swallows_it_and_says_how_to_settle(bench: Bench) -> None:
    # It may be told to end before it has heard its answer: that it says so all the same is for the test.
    bench.agent(
        "import signal\n"
        "told = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.set())\n"
        "order()\n"
        "try: print(mail()['id'])\n"
        "except urllib.error.HTTPError as error: print(error.code, flush=True)\n"
        "else: sys.exit(0)\n"
        "sys.exit(143 if told.wait(300) else 0)"
    )
    bench.sandbox.fault(match={"path": "/email/send"}, drop="after")
    code, out, err = bench.run()
    assert (code, out) == (3, "424\n")
    assert "needs a person: ambiguous" in err
    commands = [line[line.index("twiceshy resolve") :] for line in err.splitlines() if "done:  " in line]
    assert [shlex.split(command)[-1] for command in commands] == ["assume_done", "send_again"]
    assert bench.outcomes == ["stopped"]

    code, _, err = bench.run()
    assert code == 3
    assert "is not started: it is ambiguous" in err
    assert commands[0] in err
    assert bench.starts == 1

    settled = bench.verb(*shlex.split(commands[0])[1:])
    assert settled.returncode == 0, settled.stderr
    assert f"run {bench.run_id} is queued" in settled.stdout
    # What the rule says of such a mail.
    assert bench.run()[:2] == (0, "M-assumed\n")
    assert bench.made("email") == 1
    assert bench.made("orders") == 1


def test_an_agent_that_ends_well_after_a_stop_is_not_done(bench: Bench) -> None:
    bench.agent("try: mail()\nexcept urllib.error.HTTPError: pass")
    bench.sandbox.fault(match={"path": "/email/send"}, drop="after")
    code, _, err = bench.run()
    assert code == 3
    assert "needs a person" in err
    assert bench.world.status(bench.run_id) == "ambiguous"


def test_a_cancelled_run_is_ended(bench: Bench) -> None:
    bench.agent("time.sleep(300)")
    process = bench.launch()
    until(lambda: bench.starts, "the agent is at work")
    bench.world.fetch("UPDATE twiceshy.run SET status = 'cancelled', ended_at = now() WHERE id = $1", bench.run_id)
    assert bench.end(process)[0] == 4
    assert bench.run()[0] == 4


# ---- interruptions


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interruption_is_passed_on_and_counts_for_nothing(bench: Bench, number: int, code: int) -> None:
    bench.agent("order(1)\nif turn == 1:\n    open(HERE + '/on', 'w')\n    time.sleep(300)\norder(2)")
    process = bench.launch()
    until((bench.folder / "on").exists, "the agent is at work")
    process.send_signal(number)
    ended, _, err = bench.end(process)
    assert ended == code
    assert f"was interrupted ({signal.Signals(number).name}); to go on: twiceshy run --run {bench.run_id}" in err
    assert bench.outcomes == ["interrupted"]
    assert bench.run()[0] == 0
    assert bench.made("orders") == 2


def test_an_agent_that_ends_well_when_interrupted_is_not_done(bench: Bench) -> None:
    bench.agent(
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "if turn == 1:\n    open(HERE + '/on', 'w')\n    time.sleep(300)\norder()"
    )
    process = bench.launch()
    until((bench.folder / "on").exists, "the agent is at work")
    process.terminate()
    assert bench.end(process)[0] == 143
    assert bench.world.status(bench.run_id) == "queued"
    assert bench.run()[0] == 0
    assert bench.made("orders") == 1


@pytest.mark.check_all
def test_a_pause_between_attempts_can_be_interrupted(bench: Bench) -> None:
    bench.agent("sys.exit(1)")
    process = bench.launch(flags=("--backoff", "60"))
    until(lambda: bench.starts == 2, "it waits for its third attempt")
    assert process.stderr is not None
    while "again in" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert bench.end(process)[0] == 130


# ---- the agent's end is not the run's


def test_an_exchange_that_is_still_out_at_the_end_ends_first(bench: Bench) -> None:
    bench.agent("threading.Thread(target=order, daemon=True).start()\nuntil('sent')")
    bench.sandbox.fault(match={"path": "/orders"}, hold="order")
    process = bench.launch()
    bench.sandbox.wait_held("order")
    bench.touch("sent")
    until(lambda: not bench.agents() and bench.starts == 1, "the agent has ended")
    assert process.poll() is None
    assert bench.world.status(bench.run_id) == "running"
    bench.sandbox.release("order")
    assert bench.end(process)[0] == 0
    assert bench.outcomes == ["done"]
    assert bench.made("orders") == 1


@pytest.mark.check_all
def test_an_answer_that_nobody_heard_and_that_is_not_final_fails_the_attempt(bench: Bench) -> None:
    bench.agent(
        "if turn == 1:\n    threading.Thread(target=order, daemon=True).start()\n    until('sent')\nelse:\n    order()"
    )
    bench.sandbox.fault(match={"path": "/orders"}, hold_before="order", status=503, times=3)
    process = bench.launch()
    bench.sandbox.wait_held("order")
    bench.touch("sent")
    # The launcher asks the sidecar about the attempt, which then writes its tape down: it waits.
    tape = "SELECT tape FROM twiceshy.attempt WHERE run_id = $1 AND tape IS NOT NULL"
    until(lambda: bench.world.fetch(tape, bench.run_id), "the launcher has asked")
    bench.sandbox.release("order")
    code, _, err = bench.end(process)
    assert "still out when the agent ended, got no final answer" in err
    assert bench.outcomes[0] == "failed"
    assert (code, bench.made("orders")) in ((0, 1), (1, 0))


# ---- deaths in the background


def test_the_agent_is_started_again_when_its_sidecar_died(bench: Bench) -> None:
    """Also one that swallows every error: what it could not do is not taken for done."""
    bench.agent("order(1)\nopen(HERE + '/on', 'w')\nif turn == 1: until('go')\ntry: mail()\nexcept Exception: pass")
    process = bench.launch()
    until((bench.folder / "on").exists, "the agent is at work")
    before = bench.world.sidecar
    os.kill(before, signal.SIGKILL)
    bench.touch("go")
    code, _, err = bench.end(process)
    assert code == 0, err
    assert "its sidecar was replaced; the agent is started again" in err
    assert bench.outcomes == ["handed_over", "done"]
    assert (bench.made("orders"), bench.made("email")) == (1, 1)
    until(lambda: bench.world.sidecar != before, "the new one is known")


@pytest.mark.check_all
def test_an_agent_that_has_not_spoken_yet_does_not_mind_a_new_sidecar(bench: Bench) -> None:
    bench.agent("until('go')\norder()")
    process = bench.launch()
    until(lambda: bench.starts, "the agent is at work")
    before = bench.world.sidecar
    os.kill(before, signal.SIGKILL)
    until(lambda: bench.world.sidecar != before, "a new one is there")
    bench.touch("go")
    assert bench.end(process)[0] == 0
    assert bench.outcomes == ["done"]


@pytest.mark.check_all
def test_two_runs_one_interrupted_and_the_keeper_killed(bench: Bench) -> None:
    bench.agent(
        "order(int(sys.argv[1]))\nopen(HERE + '/on' + sys.argv[1], 'w')\nuntil('go')\norder(10 + int(sys.argv[1]))"
    )
    first = bench.launch(*bench.command, "1", run=f"{bench.run_id}-1")
    second = bench.launch(*bench.command, "2", run=f"{bench.run_id}-2")
    for name in ("on1", "on2"):
        until((bench.folder / name).exists, "both are at work")
    first.send_signal(signal.SIGINT)
    assert bench.end(first)[0] == 130
    before = bench.world.keeper
    os.kill(before, signal.SIGKILL)
    bench.touch("go")
    code, _, err = bench.end(second)
    assert code == 0, err
    assert bench.world.outcomes(f"{bench.run_id}-2")[-1] == "done"
    assert bench.made("orders") == 3
    until(lambda: bench.world.keeper != before, "the new keeper is known")


@pytest.mark.check_all
def test_a_lost_connection_to_the_database_is_made_again(bench: Bench) -> None:
    bench.agent("order(1)\nopen(HERE + '/on', 'w')\nuntil('go')\norder(2)")
    process = bench.launch()
    until((bench.folder / "on").exists, "the agent is at work")
    bench.world.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    bench.touch("go")
    assert bench.end(process)[0] == 0
    assert bench.outcomes == ["done"]
    assert bench.made("orders") == 2


# ---- the tape


def test_what_happened_is_shown(bench: Bench) -> None:
    bench.agent("order(1)\nif turn == 1: os.kill(os.getpid(), 9)\norder(2)")
    assert bench.run()[0] == 0
    shown = bench.verb("show", bench.run_id).stdout
    assert "done · 2 attempts" in shown
    assert "✂ died" in shown
    assert "✔ done" in shown
    told = json.loads(bench.verb("show", "--json", bench.run_id).stdout)
    assert [attempt["outcome"] for attempt in told["attempts"]] == ["died", "done"]
    assert [step["statuses"] for step in told["steps"]] == [[201], [201]] or told["steps"]
    assert told["totals"]["replayed"] == 1
    listed = json.loads(bench.verb("runs", "--json", "--status", "done").stdout)
    assert bench.run_id in [row["run"] for row in listed]
    assert bench.run_id in bench.verb("runs").stdout
    missing = bench.verb("show", "nobody")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("twiceshy: there is no run 'nobody'")


def test_a_claimed_token_speaks_for_the_run(bench: Bench) -> None:
    claimed = json.loads(bench.verb("claim", "--json", bench.run_id).stdout)
    address = claimed["environment"]["http_proxy"]
    assert address.startswith(f"http://{bench.run_id}:{claimed['token']}@127.0.0.1:")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": address}))
    with opener.open("http://twiceshy.internal/run", timeout=20) as answer:
        assert json.load(answer)["run"] == bench.run_id
