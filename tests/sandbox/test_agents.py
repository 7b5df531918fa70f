import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.client import PROJECT, Sandbox

AGENTS = PROJECT / "sandbox" / "agents"


def environment(sandbox: Sandbox, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "SANDBOX_URL": sandbox.url, **more}


def run(sandbox: Sandbox, agent: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(AGENTS / agent), *arguments]
    return subprocess.run(command, env=environment(sandbox), capture_output=True, text=True, timeout=30)


def test_grocery_undisturbed(sandbox: Sandbox) -> None:
    done = run(sandbox, "grocery.py")
    assert done.returncode == 0, done.stderr
    assert [line[0] for line in done.stdout.splitlines()] == list("123456")
    assert sandbox.counts() == {"llm": 3, "orders": 1, "email": 1}


def test_refund_undisturbed(sandbox: Sandbox) -> None:
    done = run(sandbox, "refund.py", "A-1001")
    assert done.returncode == 0, done.stderr
    assert sandbox.counts() == {"llm": 2, "payments": 1, "crm": 1, "email": 1}
    assert [request.path for request in sandbox.requests()] == [
        "/orders/A-1001",
        "/v1/chat/completions",
        "/payments/v1/refunds",
        "/crm/notes",
        "/v1/chat/completions",
        "/email/send",
    ]
    letter = sandbox.effects("email")[0].facts["mail"]["text"]
    assert "re_0001" in letter
    # Two runs are told apart by nothing.
    assert run(sandbox, "refund.py", "A-1001").stdout.count("…") == done.stdout.count("…") > 10


def test_agents_say_what_went_wrong(sandbox: Sandbox) -> None:
    sandbox.fault(match={"service": "payments"}, status=503)
    done = run(sandbox, "refund.py")
    assert done.returncode == 1
    assert "503 Service Unavailable" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("agent", ["grocery.py", "refund.py"])
def test_agents_linger_where_told(sandbox: Sandbox, tmp_path: Path, agent: str) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    env = environment(sandbox, AGENT_LINGER=f"6:{flag}")
    command = [sys.executable, str(AGENTS / agent)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("6 ") for line in process.stdout)
        assert process.poll() is None
        flag.unlink()
        assert process.wait(20) == 0
