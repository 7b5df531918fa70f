import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.client import PROJECT
from sandbox.demo import Demo
from sandbox.screen import RED, Screen
from sandbox.stage import Stage, processes, read


def left_of(folder: str) -> list[int]:
    needle = folder.encode()
    return [pid for pid in processes() if pid != os.getpid() and needle in read(pid, "environ") + read(pid, "cmdline")]


def test_naive_pays_three_times() -> None:
    out = io.StringIO()
    with Stage() as stage:
        demo = Demo(stage, Screen(out))
        assert demo.undisturbed().counts == {"llm": 2, "payments": 1, "crm": 1, "email": 1}
        assert demo.naive().counts == {"llm": 5, "payments": 3, "crm": 2, "email": 1}
    assert left_of(str(stage.folder)) == []
    assert not stage.folder.exists()
    assert out.getvalue().count("SIGKILL") == 2


@pytest.mark.check_all
def test_the_same_agent_behind_the_sidecar() -> None:
    with Stage() as stage:
        demo = Demo(stage, Screen(io.StringIO()))
        undisturbed = demo.undisturbed()
        demo.prepared(demo.prepare())
        journal = demo.behind_sidecar("journal")
        durable = demo.behind_sidecar("durable")
    assert journal.counts == {"llm": 2, "payments": 2, "crm": 1, "email": 1}
    assert {request.header("idempotency-key") for request in journal.requests} == {None}
    assert durable.counts == undisturbed.counts
    assert durable.letters == undisturbed.letters
    refunds = [request for request in durable.requests if request.service == "payments"]
    assert len(refunds) == 2
    assert len({request.header("idempotency-key") for request in refunds} - {None}) == 1
    assert left_of(str(stage.folder)) == []


@pytest.mark.parametrize(
    "moment",
    [
        "order A-1001",
        pytest.param("━━ journal only", marks=pytest.mark.check_all),
        pytest.param("AND sidecar", marks=pytest.mark.check_all),
        pytest.param("alone: in the middle", marks=pytest.mark.check_all),
    ],
)
def test_ctrl_c_leaves_nothing(moment: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sandbox.demo"], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        seen = []
        for line in demo.stdout:
            seen.append(line)
            if moment in line:
                break
        else:
            pytest.fail("".join(seen[-30:]))
        log = next(word for pid in children(demo.pid) for word in read(pid, "cmdline").split(b"\0") if b".log" in word)
        folder = Path(log.decode()).parent
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(60) == 130
    assert "interrupted" in rest
    assert left_of(str(folder)) == []
    assert not folder.exists()


def children(pid: int) -> list[int]:
    return [each for each in processes() if f"\nPPid:\t{pid}\n".encode() in read(each, "status")]


def test_streamed_words_share_a_line() -> None:
    out = io.StringIO()
    screen = Screen(out)
    for line in ("1 order", "  …Dear", "  … customer", "2 done"):
        screen.echo(line)
    screen.say("end", RED)
    assert out.getvalue() == "   │ 1 order\n   │   Dear customer \n   │ 2 done\nend\n"
