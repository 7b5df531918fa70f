"""What agents look like with the library: the examples, each killed in the middle, judged by what was really done."""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import twiceshy
from runtime import approvals, events
from runtime.api import keys
from tests.apart import ask_database
from tests.kill.launchers import Bench, until
from tests.kill.works import Works
from tests.stack import PROJECT, ROUTES

pytestmark = pytest.mark.check_all
WORLD = {"hold": "0.2", "park_quiet": "0.4", "continue_after": "12"}


def take(bench: Bench, name: str) -> None:
    """The bench's agent is the example *name*, in a copy of its own: others may run it, too."""
    bench.program.write_text((PROJECT / "sandbox" / "agents" / f"{name}.py").read_text("utf-8"), "utf-8")
    model = {"OPENAI_BASE_URL": bench.sandbox.url + "/v1", "OPENAI_API_KEY": "any", "MODEL": "gpt-sandbox"}
    bench.world.environment.update(model)


def start(bench: Bench, given: Any) -> Any:
    return bench.launch(flags=("--input", json.dumps(given)))


def kill_agents(bench: Bench) -> None:
    for pid in bench.agents():
        os.kill(pid, signal.SIGKILL)


def parked(bench: Bench, run: str, kind: str) -> None:
    """Wait until *run* is parked at a step of *kind*, and no process of it is left."""

    def is_so() -> bool:
        last = "SELECT kind FROM twiceshy.step s WHERE s.run_id = r.id ORDER BY begun DESC LIMIT 1"
        found = bench.world.fetch(f"SELECT status, ({last}) AS kind FROM twiceshy.run r WHERE id = $1", run)
        return bool(found) and (found[0]["status"], found[0]["kind"]) == ("parked", kind) and not bench.agents()

    until(is_so, f"run {run} is parked ({kind})")


def decide(bench: Bench, run: str, name: str, decision: Any, **more: Any) -> None:
    ask_database(bench.world.dsn, approvals.decide, run, name, decision, **more)


def send(bench: Bench, run: str, name: str, *payloads: Any) -> None:
    for payload in payloads:
        ask_database(bench.world.dsn, events.send, run, name, json.dumps(payload).encode(), limit=10_000)


def approvals_of(bench: Bench, runs: list[str]) -> set[str]:
    """Which of *runs* wait for an approval."""
    open_ones = ask_database(bench.world.dsn, approvals.open_ones, name="refund", limit=100)
    return {each.run for each in open_ones} & set(runs)


def declare(works: Works, **more: Any) -> None:
    """The agents ``a`` and ``b`` are the bench's program."""
    fields = {"command": [sys.executable, str(works.program)], **more}
    lines = "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())
    works.config.write_text(f"{ROUTES.read_text()}\n[agents.a]\n{lines}\n[agents.b]\n{lines}\n")


def api_of(bench: Bench) -> twiceshy.Client:
    """The API that the world's keeper has."""
    folder = bench.world.home
    until(lambda: keys.read(keys.address_file(folder)), "the API listens")
    return twiceshy.Client(keys.read(keys.address_file(folder)), keys.read(keys.key_file(folder)))


def result(bench: Bench) -> Any:
    return json.loads(bench.world.fetch("SELECT result FROM twiceshy.run WHERE id = $1", bench.run_id)[0]["result"])


def ends_well(bench: Bench, launcher: Any) -> None:
    code, out, err = bench.end(launcher)
    assert code == 0, err
    assert "Traceback" not in out + err
    assert "never retrieved" not in err


# ---- (1) model calls and a mail


def test_a_briefing_pays_for_each_model_call_once_and_is_mailed_once(bench: Bench) -> None:
    take(bench, "briefing")
    bench.sandbox.fault(match={"path": "/v1/chat/completions"}, nth=3, hold="model")
    bench.sandbox.fault(match={"path": "/email/send"}, hold="mail")
    launcher = start(bench, {"topic": bench.run_id, "to": "ada@example.org"})
    for gate in ("model", "mail"):
        bench.sandbox.wait_held(gate)
        kill_agents(bench)
        bench.sandbox.release(gate)
    ends_well(bench, launcher)
    assert result(bench)["parts"] == 3
    assert (bench.made("llm"), bench.made("email")) == (4, 1)
    assert bench.outcomes == ["died", "died", "done"]
    [mail] = [each.json() for each in bench.sandbox.requests("email") if bench.run_id in each.json()["subject"]]
    assert len(mail["text"].split("\n\n")) == 3


# ---- (2) sleep, and an approval with a time limit


def test_an_article_rests_and_is_published_when_somebody_approves(bench: Bench) -> None:
    take(bench, "publish")
    launcher = start(bench, {"topic": bench.run_id, "rest": 1})
    parked(bench, bench.run_id, "sleep")
    parked(bench, bench.run_id, "approval")
    launcher.kill()
    launcher = start(bench, {"topic": bench.run_id, "rest": 1})
    decide(bench, bench.run_id, "publish", "approve", by="ann")
    ends_well(bench, launcher)
    assert (bench.made("llm"), bench.made("crm"), bench.made("email")) == (1, 1, 0)
    assert bench.sandbox.effects("crm")[-1].facts["row"]["approved_by"] == "ann"


def test_an_article_that_nobody_looks_at_is_not_published(bench: Bench) -> None:
    take(bench, "publish")
    launcher = start(bench, {"topic": bench.run_id, "rest": 0, "patience": 1})
    ends_well(bench, launcher)
    assert result(bench) == "timed out"
    assert (bench.made("llm"), bench.made("crm"), bench.made("email")) == (1, 0, 1)


# ---- (3) many documents


def test_documents_are_embedded_once_each_and_the_next_attempt_goes_on_in_the_middle(
    bench: Bench, tmp_path: Path
) -> None:
    take(bench, "embedding")
    bench.sandbox.fault(match={"path": "/v1/embeddings"}, nth=4, hold="model")
    documents = [f"{bench.run_id} {n}" for n in range(8)]
    launcher = start(bench, {"documents": documents, "folder": str(tmp_path)})
    bench.sandbox.wait_held("model")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("?.json")}
    assert sorted(before) == ["0.json", "1.json", "2.json"]
    kill_agents(bench)
    bench.sandbox.release("model")
    ends_well(bench, launcher)
    assert result(bench) == {"embedded": 8}
    assert bench.made("llm") == 8
    assert len([*tmp_path.glob("?.json")]) == 8
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before  # not written again


# ---- (4) for ever


def test_an_assistant_answers_every_message_once_and_goes_on_as_new_with_what_it_remembers(works: Works) -> None:
    take(works, "assistant")
    declare(works)
    [run] = works.queue("ada", given=json.dumps({"to": works.run_id}).encode())
    messages = [f"message {n}" for n in range(10)]
    before = len(works.sandbox.requests())
    # 12 steps are 4 messages: it dies when the last of them is being answered, and replays past 12 steps.
    works.sandbox.fault(match={"path": "/email/send"}, nth=4, hold="mail")
    works.sandbox.fault(match={"path": "/v1/chat/completions"}, nth=6, hold="model")
    works.worker()
    send(works, run, "message", *messages[:7])
    for gate in ("mail", "model"):
        works.sandbox.wait_held(gate)
        kill_agents(works)
        works.sandbox.release(gate)
    until(lambda: works.made("email") == 7, "seven are answered")
    send(works, run, "message", *messages[7:])
    until(lambda: works.made("email") == 10, "all are answered")
    asked = [each.json()["messages"] for each in works.sandbox.requests("llm") if each.n > before]
    assert [each[-1]["content"] for each in asked] == messages
    assert [each["content"] for each in asked[-1] if each["role"] == "user"] == messages  # it remembers them all
    assert works.made("llm") == 10
    chain = "SELECT count(*) AS runs FROM twiceshy.run WHERE id = $1 OR first_run = $1"
    assert works.world.fetch(chain, run)[0]["runs"] == 3


# ---- (5) a manager's approval


def test_a_refund_waits_for_the_manager_and_whoever_dies_is_made_once(works: Works) -> None:
    take(works, "approved_refund")
    declare(works)
    [yes] = works.queue("yes", given=b'{"order": "A-1001"}')
    [no] = works.queue("no", given=b'{"order": "A-1002"}')
    works.sandbox.fault(match={"path": "/payments/*"}, hold="refund")
    works.sandbox.fault(match={"path": "/email/send"}, hold="mail")
    worker = works.worker()
    for run in (yes, no):
        parked(works, run, "approval")
    client = api_of(works)
    client.decide(no, "refund", False, by="bob", comment="never")
    assert client.result(no, timeout=60) == {"declined": "never", "by": "bob"}
    client.decide(yes, "refund", True, by="ann")
    works.sandbox.wait_held("refund")
    kill_agents(works)
    works.sandbox.release("refund")
    works.sandbox.wait_held("mail")
    worker.kill()
    works.sandbox.release("mail")
    works.worker()
    assert client.result(yes, timeout=60)["by"] == "ann"
    assert [works.made(service) for service in ("llm", "payments", "crm", "email")] == [3, 1, 1, 1]


def test_whoever_dies_a_ticket_costs_two_model_calls_and_is_settled_once(works: Works) -> None:
    """Agents and workers are killed at random; by a seed, so that one that fails can be tried again."""
    chance = random.Random(20261130)
    take(works, "approved_refund")
    declare(works, max_attempts=100)
    runs = [works.queue(str(n), given=json.dumps({"order": f"A-{2000 + n}"}).encode())[0] for n in range(12)]
    workers = [works.worker("--slots", "3") for _ in range(2)]
    deaths = {"worker": 0, "agent": 0}
    decided: set[str] = set()
    deadline, turns = time.monotonic() + 240, itertools.count(1)
    while {works.world.status(run) for run in runs} != {"done"}:
        assert time.monotonic() < deadline, {run: works.world.outcomes(run) for run in runs}
        if next(turns) % 4 == 0 and deaths["worker"] < 6:
            n = chance.randrange(len(workers))
            workers[n].kill()
            workers[n].wait()
            workers[n] = works.worker("--slots", "3")
            deaths["worker"] += 1
        elif (living := works.agents()) and deaths["agent"] < 40:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(living), signal.SIGKILL)
                deaths["agent"] += 1
        for run in approvals_of(works, runs) - decided:
            decide(works, run, "refund", "approve", by="ann")
            decided.add(run)
        time.sleep(0.2)
    assert min(deaths.values()) > 0
    assert decided == set(runs)
    assert {works.result(run)["by"] for run in runs} == {"ann"}
    assert [works.made(service) for service in ("llm", "payments", "crm", "email")] == [24, 12, 12, 12]


# ---- the sidecar dies


def test_the_agent_goes_on_with_the_next_sidecar(bench: Bench) -> None:
    bench.program.write_text(COUNTS)
    lines = bench.folder / "lines"
    launcher = start(bench, 40)
    until(lambda: lines.exists() and lines.stat().st_size > 20, "it has done some steps")
    os.kill(bench.world.sidecar, signal.SIGKILL)
    ends_well(bench, launcher)
    assert result(bench) == 40
    assert bench.outcomes == ["handed_over", "done"]
    done = [int(line) for line in lines.read_text().split()]
    assert sorted(set(done)) == list(range(40))
    assert len(done) <= 41  # one may have been under way


COUNTS = """
import os, time
import twiceshy

def work(n):
    with open(os.environ["HERE"] + "/lines", "a") as file:
        file.write(f"{n}\\n")
    time.sleep(0.05)

@twiceshy.agent
def main(given):
    for n in range(given):
        twiceshy.step("work", work, n)
    return given

main.main()
"""


# ---- work done elsewhere


def test_children_are_started_once_and_their_results_awaited(works: Works) -> None:
    works.program.write_text(CHILDREN)
    declare(works, children=["a", "b"])
    [run] = works.queue("parent", given=b"3")
    worker = works.worker()
    until(lambda: works.starts == 1, "it has started them")
    worker.kill()
    works.touch("go")
    works.worker()
    works.comes("done", run)
    assert works.result(run) == [0, 1, 4, "run failed"]
    assert works.world.fetch("SELECT count(*) AS runs FROM twiceshy.run WHERE parent = $1", run)[0]["runs"] == 4


CHILDREN = """
import asyncio, os, time
import twiceshy
from twiceshy import aio

@twiceshy.agent
async def main(given):
    if isinstance(given, list):
        assert given != ["bad"]
        return given[0] ** 2
    runs = await asyncio.gather(*(aio.start("b", [n]) for n in range(given)), aio.start("b", ["bad"]))
    with open(os.environ["HERE"] + "/starts", "a") as file:
        file.write("x")
    while not os.path.exists(os.environ["HERE"] + "/go"):
        await asyncio.sleep(0.01)
    try:
        return [*await asyncio.gather(*map(aio.result, runs[:-1])), await aio.result(runs[-1])]
    except twiceshy.ChildFailed as failed:
        return [*await asyncio.gather(*map(aio.result, runs[:-1])), f"run {failed.status}"]

main.main()
"""
