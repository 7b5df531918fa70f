"""Agents that are a function: forked from a process that has their libraries, and nothing of theirs."""

import os
import signal

import pytest

from tests.kill.launchers import until
from tests.kill.processes import lives
from tests.kill.works import Works
from tests.stack import PROJECT


def test_a_function_is_called_with_the_input_and_its_value_is_the_result(works: Works) -> None:
    works.declare_function(
        """
import asyncio, twiceshy
order(7)  # when the module is imported: its environment is set by then
@twiceshy.agent
async def work(given):
    await asyncio.sleep(0)
    print("in", os.getcwd(), sys.argv, flush=True)
    return {"n": given["n"] + 1, "libraries": [name for name in ("decimal", "agent") if name in sys.modules]}
""",
        preload=["decimal", "this"],
    )
    runs = works.queue("one", "two", given=b'{"n": 1}')
    works.worker()
    works.comes("done", *runs)
    assert [works.result(run) for run in runs] == [{"n": 2, "libraries": ["decimal", "agent"]}] * 2
    assert works.made("orders") == 2
    assert works.said().count("Zen of Python") == 1
    assert f"in {works.folder} ['agent:work']" in works.said()


@pytest.mark.check_all
def test_what_a_function_raises_or_returns_that_is_no_json_has_failed(works: Works) -> None:
    works.declare_function(
        """
def work(given):
    if given == "raise": raise ValueError("this order is unknown")
    if given == "exit": sys.exit(4)
    return {"set": {1}, "inf": 1e999, "put": internal("PUT", "/result", 5)}[given]
""",
        max_attempts=1,
    )
    [raises] = works.queue("raise", given=b'"raise"')
    [no_json] = works.queue("set", given=b'"set"')
    [infinite] = works.queue("inf", given=b'"inf"')
    [exits] = works.queue("exit", given=b'"exit"')
    [none] = works.queue("put", given=b'"put"')
    works.worker()
    works.comes("failed", raises, no_json, infinite, exits)
    works.comes("done", none)
    said = works.said()
    assert "ValueError: this order is unknown" in said
    assert "Traceback" in said
    assert said.count("agent:work returned what is not JSON") == 2
    assert "exit code 4" in works.error(exits)
    assert works.result(none) == 5  # it returned None: what it has PUT counts


@pytest.mark.check_all
def test_a_killed_agent_goes_on_and_a_killed_worker_takes_its_agents_along(works: Works) -> None:
    works.declare_function(
        """
import subprocess
def work(given):
    write("before")
    helper = subprocess.Popen(["sleep", "300"])
    if turn == 1: os.kill(os.getpid(), 9)
    until("go")
    write("after")
"""
    )
    [run] = works.queue("one")
    first = works.worker()
    until(lambda: works.starts == 2 and len(works.forked()) == 1, "it is started again")
    [server] = works.fork_servers()
    first.kill()
    first.wait()
    until(lambda: not works.forked() and not lives(server), "agent and fork server die with it")
    works.touch("go")
    works.worker()
    works.comes("done", run)
    assert works.world.outcomes(run) == ["died", "died", "done"]
    assert works.mails() == [(run, "after"), (run, "before")]


def test_a_fork_server_that_dies_or_hangs_is_started_again_and_its_agents_do_not_notice(works: Works) -> None:
    works.declare_function("\ndef work(given):\n    write('x'); until(RUN); return 1\n")
    [one] = works.queue("one")
    works.worker("--slots", "3")
    until(lambda: works.made("email") == 1, "it is at work")
    [server] = works.fork_servers()
    os.kill(server, signal.SIGKILL)
    [two] = works.queue("two")
    until(lambda: works.made("email") == 2, "another server forks")
    assert works.fork_servers() not in ([], [server])
    works.touch(one)
    works.touch(two)
    works.comes("done", one, two)
    assert "its fork server" in works.said()
    assert [works.world.outcomes(run) for run in (one, two)] == [["done"], ["done"]]
    until(lambda: not works.forked(), "no agent is left")


@pytest.mark.check_all
def test_a_fork_server_that_does_not_answer_is_killed(works: Works) -> None:
    works.declare_function("\ndef work(given):\n    write('x'); until(RUN); return 1\n")
    [one] = works.queue("one")
    works.worker("--slots", "3")
    until(lambda: works.made("email") == 1, "it is at work")
    [server] = works.fork_servers()
    os.kill(server, signal.SIGSTOP)
    works.touch(one)
    [two] = works.queue("two")
    works.touch(two)
    works.comes("done", one, two, seconds=90)
    assert not lives(server)
    assert [works.world.outcomes(run) for run in (one, two)] == [["done"], ["done"]]


@pytest.mark.check_all
@pytest.mark.parametrize(
    ("preload", "words"),
    [
        ("no_such_library", "cannot preload no_such_library: ModuleNotFoundError"),
        ("hangs", "was still importing hangs after preload_timeout = 1 s"),
        ("dies", "ended while importing dies"),
    ],
)
def test_a_preload_that_goes_wrong_is_told_and_bounded(works: Works, preload: str, words: str) -> None:
    libraries = works.folder / "libraries"
    libraries.mkdir()
    (libraries / "hangs.py").write_text("import time\ntime.sleep(600)")
    (libraries / "dies.py").write_text("import os\nos._exit(9)")
    works.declare_function("\ndef work(given):\n    return 1\n", preload=[preload], max_attempts=2)
    [run] = works.queue("one")
    works.worker(preload_timeout=1, more={"PYTHONPATH": f"{PROJECT}:{libraries}"})
    works.comes("failed", run)
    assert words in works.error(run)
    until(lambda: not works.fork_servers(), "no fork server is left")


@pytest.mark.check_all
def test_a_client_that_a_library_builds_when_it_is_preloaded_is_refused_and_its_threads_are_named(works: Works) -> None:
    """It has no run's credentials, and must not go past the journal."""
    libraries = works.folder / "libraries"
    libraries.mkdir()
    (libraries / "eager.py").write_text(
        "import os, threading, urllib.request\n"
        "opener = urllib.request.build_opener()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    works.declare_function(
        """
import eager
def work(given):
    try:
        eager.opener.open(URL + "/orders/A-1001")
    except urllib.error.HTTPError as error:
        return [error.code, error.headers["Twiceshy-Error"], json.load(error)["message"]]
""",
        preload=["eager"],
    )
    [run] = works.queue("one")
    works.worker(more={"PYTHONPATH": f"{PROJECT}:{libraries}"})
    works.comes("done", run)
    code, error, message = works.result(run)
    assert (code, error) == (423, "fenced")
    assert "a-client-built-while-preloading" in message
    assert "has started 1 thread" in works.said()
    assert works.made("orders") == 0


@pytest.mark.check_all
def test_the_clients_of_a_module_speak_for_their_run_whatever_was_preloaded(works: Works) -> None:
    python = PROJECT / ".agents" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: `make test` makes it")
    works.declare_function(
        """
import openai, requests
session, client = requests.Session(), openai.OpenAI(base_url=URL + "/v1", api_key="sk-x")
def work(given):
    said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": RUN}])
    session.post(URL + "/email/send", json={"to": "a@example.org", "subject": RUN, "text": "x"})
    if turn == 1: os.kill(os.getpid(), 9)
    return said.choices[0].message.content
""",
        interpreter=str(python), preload=["openai", "requests"],
    )  # fmt: skip
    [run] = works.queue("one")
    works.worker()
    works.comes("done", run)
    assert works.world.outcomes(run) == ["died", "done"]
    assert (works.made("llm"), works.made("email")) == (1, 1)
    assert works.world.fetch("SELECT count(*) AS n FROM twiceshy.step WHERE run_id = $1", run)[0]["n"] == 2


@pytest.mark.check_all
def test_an_agent_that_stays_when_the_worker_is_told_to_stop_is_interrupted(works: Works) -> None:
    works.declare_function("\ndef work(given):\n    write('before'); until('go'); write('after')\n")
    [run] = works.queue("one")
    worker = works.worker("--drain-agents", "0.1")
    until(lambda: works.made("email") == 1, "it has written")
    worker.send_signal(signal.SIGTERM)
    assert works.ends(worker) == 0
    assert (works.forked(), works.world.outcomes(run)) == ([], ["interrupted"])
