"""What agents look like with the library: the examples, each killed in the middle, judged by what was really done."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import approvals
from runtime.database import connect
from tests.kill.launchers import Bench, until
from tests.kill.works import Works
from tests.stack import PROJECT, ROUTES, wait_apart

pytestmark = pytest.mark.check_all
WORLD = {"hold": "0.2", "park_quiet": "0.4"}


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
    async def work() -> None:
        connection = await connect(bench.world.dsn, name="test")
        try:
            await approvals.decide(connection, run, name, decision, **more)
        finally:
            await connection.close()

    wait_apart(work())


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


# ---- (5) a manager's approval


def test_a_refund_waits_for_the_manager_and_whoever_dies_is_made_once(works: Works) -> None:
    take(works, "approved_refund")
    command = json.dumps([sys.executable, str(works.program)])
    works.config.write_text(f"{ROUTES.read_text()}\n[agents.a]\ncommand = {command}\n[agents.b]\ncommand = {command}\n")
    [yes] = works.queue("yes", given=b'{"order": "A-1001"}')
    [no] = works.queue("no", given=b'{"order": "A-1002"}')
    works.sandbox.fault(match={"path": "/payments/*"}, hold="refund")
    works.sandbox.fault(match={"path": "/email/send"}, hold="mail")
    worker = works.worker()
    for run in (yes, no):
        parked(works, run, "approval")
    decide(works, no, "refund", "decline", by="bob", comment="never")
    works.comes("done", no)
    assert works.result(no) == {"declined": "never", "by": "bob"}
    decide(works, yes, "refund", "approve", by="ann")
    works.sandbox.wait_held("refund")
    kill_agents(works)
    works.sandbox.release("refund")
    works.sandbox.wait_held("mail")
    worker.kill()
    works.sandbox.release("mail")
    works.worker()
    works.comes("done", yes)
    assert works.result(yes)["by"] == "ann"
    assert [works.made(service) for service in ("llm", "payments", "crm", "email")] == [3, 1, 1, 1]
