"""``twiceshy env`` and ``twiceshy claim`` in real shells: at a prompt, in scripts, in loops; what they leave behind."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import folder as state
from sandbox.client import Sandbox
from tests.kill.processes import below, command, lives, postgres_pid
from tests.kill.test_terminal import Shell
from tests.stack import PROJECT, ROUTES

TWICESHY = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -m proxy.cli "$@"
"""
#: Looks, asks its model, orders, writes. It goes on when it is refused, and says by what.
AGENT = """
import json, os, sys, urllib.error, urllib.request
def call(method, path, body=None):
    url = path if path.startswith("http:") else os.environ["SANDBOX_URL"] + path
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read()
            return "replayed" if answer.headers["Twiceshy-Replayed"] else "live"
    except urllib.error.HTTPError as error:
        print(error.code, error.reason, json.load(error)["detail"], file=sys.stderr)
        return error.headers["Twiceshy-Error"]
chat = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
print("<began>", flush=True)
said = [call("GET", "/pantry"), call("POST", "/v1/chat/completions", chat)]
said += [call("POST", "/orders", {"lines": [{"sku": "tea", "n": 1}], "total": 1})]
if os.environ.get("DIES") == "here" and not os.path.exists(os.environ["HOME"] + "/died"):
    open(os.environ["HOME"] + "/died", "w").close()
    os.kill(os.getpid(), 9)
said += [call("POST", "/email/send", {"to": "ada@example.org", "subject": "s", "text": "t"})]
if "result" in sys.argv: said += [call("PUT", "http://twiceshy.internal/result", {})]
print("<said", *said, end=">\\n", flush=True)
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox.start(tmp_path / "sandbox.log") as started:
        yield started


@pytest.fixture
def around(home: Path, tmp_path: Path, sandbox: Sandbox) -> dict[str, str]:
    """The environment of a shell, with an agent and a ``twiceshy`` on its PATH. The database is an embedded one."""
    (tmp_path / "twiceshy").write_text(TWICESHY)
    (tmp_path / "twiceshy").chmod(0o755)
    (tmp_path / "agent").write_text(f"#!{sys.executable} -IS\n{AGENT}")
    (tmp_path / "agent").chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(PROJECT),
        "TWICESHY_HOME": str(home), "TWICESHY_CONFIG": str(ROUTES), "SANDBOX_URL": sandbox.url,
    }  # fmt: skip


@pytest.fixture
def given(around: dict[str, str], outside: str, home: Path) -> Iterator[dict[str, str]]:
    """The same on the session's database. What is left behind ends before that is gone."""
    yield around | {"DATABASE_URL": outside}
    until(lambda: not below(home), "keeper and sidecar end with the last shell")


@pytest.fixture
def shell(given: dict[str, str], tmp_path: Path) -> Iterator[Shell]:
    """An interactive bash."""
    opened = Shell(tmp_path, given)
    yield opened
    opened.close()


def script(text: str, given: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run *text* as a script: no job control, so all it starts is one process group."""
    return subprocess.run(
        ["bash", "-c", text], env=given, capture_output=True, text=True, timeout=90, start_new_session=True
    )


def said(text: str) -> list[list[str]]:
    return [one.split() for one in re.findall(r"^<said (.*)>", text, re.MULTILINE)]


def holders(home: Path) -> list[int]:
    """The processes that keep a sidecar of *home* for a shell."""
    locks = (path for path in home.rglob("shells/*.lock") if state.Lock(path).held())
    return sorted(int(path.stem) for path in locks)


EFFECTS = {"llm": 1, "orders": 1, "email": 1}


# ---- interactive


def test_interrupted_and_started_again_it_goes_on(shell: Shell, sandbox: Sandbox, home: Path) -> None:
    sandbox.fault(match={"path": "/email/send"}, hold="mail")
    shell.type('eval "$(twiceshy env --run r1)"\n')
    shell.expect("twiceshy: run r1, proxy 127.0.0.1:", 60)
    shell.expect("<prompt>")
    assert holders(home) == [shell.pid]
    shell.type("agent\n")
    shell.expect("\n<began>")
    sandbox.wait_held("mail")
    shell.type("\x03")
    shell.expect("KeyboardInterrupt")
    shell.expect("<prompt>")
    shell.type("agent\n")
    shell.expect("\n<began>")
    sandbox.release("mail")
    *before, mail = shell.expect(">").split()
    assert before == ["<said", *["replayed"] * 3]
    assert mail in ("live", "replayed")  # joined, or it came too late for that
    shell.type("agent; agent result\n")
    for rest in ([], ["live"]):
        shell.expect("\n<began>")
        assert shell.expect(">").split() == ["<said", *["replayed"] * 4, *rest]
    shell.expect("<prompt>")
    assert sandbox.counts() == EFFECTS
    assert len(sandbox.requests(method="POST")) == 3
    shell.type("twiceshy runs; agent\n")
    assert re.search(r"r1\s+done", shell.expect("\n<began>"))
    shell.expect("Run r1 is done, not running")
    shell.expect("<said not-running not-running not-running not-running>")


def test_a_loop_typed_at_a_prompt_is_one_group_each(shell: Shell, sandbox: Sandbox) -> None:
    shell.type('eval "$(twiceshy env --run r1)"; for i in 1 2 3; do agent; done\n')
    for turn in range(3):
        shell.expect("\n<began>", 60)
        assert shell.expect(">").split() == ["<said", *["replayed" if turn else "live"] * 4]
    assert sandbox.counts() == EFFECTS


@pytest.mark.check_all
def test_twiceshy_run_takes_over_from_an_agent_in_the_background(
    shell: Shell, sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.fault(match={"path": "/email/send"}, hold="mail")
    shell.type('eval "$(twiceshy env --run r1)"; agent > ~/out 2>&1 &\n')
    sandbox.wait_held("mail")
    shell.type("agent\n")  # another group, while the first lives
    shell.expect("is alive")
    shell.expect("<said fenced fenced fenced fenced>")
    shell.type("twiceshy run --run r1 -- agent\n")
    shell.expect("attempt 2", 60)
    shell.expect("<began>")
    until(lambda: "RemoteDisconnected" in (tmp_path / "out").read_text(), "the first agent is cut off")
    sandbox.release("mail")
    shell.expect("<said replayed replayed replayed ")
    assert shell.expect(">") in ("live", "replayed")
    shell.expect("<prompt>")
    assert sandbox.counts() == EFFECTS
    shell.type("twiceshy env --run r1; echo code $?\n")
    shell.expect("code 1")


@pytest.mark.check_all
def test_a_run_that_was_claimed_or_has_ended_is_not_for_env(shell: Shell) -> None:
    shell.type('twiceshy claim r1 > ~/token; eval "$(twiceshy env --run r1)"; echo "proxy <$http_proxy>"\n')
    shell.expect("twiceshy: run r1 was claimed with a token", 60)
    shell.expect("\nproxy <>")


# ---- scripts


def test_in_a_scripts_loop_the_second_one_is_refused(given: dict[str, str], sandbox: Sandbox) -> None:
    done = script('eval "$(twiceshy env --run r1)"; for i in 1 2; do agent; done', given)
    first, second = said(done.stdout)
    assert first == ["live"] * 4
    assert second == ["live", "no-attempt", "no-attempt", "no-attempt"]
    assert sandbox.counts() == EFFECTS
    for way in ("Twiceshy-Step", "twiceshy run --run r1", "twiceshy claim r1"):
        assert way in done.stderr
    assert "428" in done.stderr


def test_a_loop_around_an_agent_that_dies_makes_nothing_twice(given: dict[str, str], sandbox: Sandbox) -> None:
    loop = 'eval "$(twiceshy env --run r1)"; until agent; do :; done'
    done = script(loop, given | {"DIES": "here"})
    assert said(done.stdout) == [["live", "no-attempt", "no-attempt", "no-attempt"]]
    assert sandbox.counts() == {"llm": 1, "orders": 1}
    # The script started anew is another group.
    assert said(script(loop, given).stdout) == [["replayed", "replayed", "replayed", "live"]]
    assert sandbox.counts() == EFFECTS
    # One of the ways out.
    wayout = script("twiceshy run -q --run r1 -- agent && twiceshy run -q --run r1 -- agent", given)
    assert wayout.returncode == 0, wayout.stderr
    assert said(wayout.stdout) == [["replayed"] * 4]
    assert sandbox.counts() == EFFECTS


def test_a_claim_prints_its_token_and_holds_the_run(given: dict[str, str], sandbox: Sandbox, tmp_path: Path) -> None:
    done = script(
        """
        cd; twiceshy claim r1 > token 2> words || exit
        eval "$(grep -v ^twiceshy: words)"
        twiceshy claim r1; echo code $?
        agent result
        twiceshy claim r1; echo code $?
        """, given,
    )  # fmt: skip
    token = (tmp_path / "token").read_text()
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}\n", token)
    first, *lines = (tmp_path / "words").read_text().splitlines()
    assert first == "# twiceshy: run r1, attempt 1; what the process of its agent needs:"
    address = rf"'http://r1:{token.strip()}@127\.0\.0\.1:\d+'"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        assert any(re.fullmatch(f"export {name}={address}", line) for line in lines), lines
    assert {"unset ALL_PROXY all_proxy SSL_CERT_DIR", "export NO_PROXY=''"} < set(lines)
    assert done.stdout.split() == ["code", "75", "<began>", "<said", *["live"] * 4, "live>", "code", "1"]
    held, ended = done.stderr.strip().splitlines()
    assert "run r1 is held by attempt 1 (claim on" in held
    assert "run r1 is done" in ended
    assert sandbox.counts() == EFFECTS


@pytest.mark.check_all
def test_a_claim_for_programs(given: dict[str, str], sandbox: Sandbox, tmp_path: Path) -> None:
    """A supervisor that is no shell needs all of it as data."""
    done = script("twiceshy claim --json r1 > ~/told", given | {"NODE_OPTIONS": "--max-old-space-size=100"})
    told = json.loads((tmp_path / "told").read_text())
    assert (told["run"], told["attempt"], done.stderr) == ("r1", 1, "")
    assert told["environment"]["HTTPS_PROXY"] == f"http://r1:{told['token']}@{told['proxy']}"
    assert told["environment"]["NODE_OPTIONS"].endswith(" --max-old-space-size=100")
    assert Path(told["environment"]["SSL_CERT_FILE"]).is_file()
    assert "PATH" not in told["environment"]
    assert told["unset"] == ["ALL_PROXY", "all_proxy", "SSL_CERT_DIR"]


# ---- what is left behind


def test_sidecar_and_database_stay_as_long_as_the_shell(around: dict[str, str], home: Path, sandbox: Sandbox) -> None:
    """With an embedded Postgres, and three asking for it."""
    text = """
    eval "$(twiceshy env --run r1)"
    twiceshy env --run r2 > /dev/null
    token=$(twiceshy claim r3)
    echo "<token $token>"
    read -r
    agent
    read -r
    """
    with subprocess.Popen(
        ["bash", "-c", text], env=around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as bash:  # fmt: skip
        assert bash.stdin is not None
        assert bash.stdout is not None
        try:
            assert bash.stdout.readline().startswith("<token ")
            assert holders(home) == [bash.pid]
            assert sum("proxy.holder" in command(pid) for pid in of_session_leaders(bash.pid)) == 1
            database = postgres_pid(home)
            bash.stdin.write("\n")
            bash.stdin.flush()
            assert bash.stdout.readline() == "<began>\n"
            assert bash.stdout.readline() == "<said live live live live>\n"
            assert postgres_pid(home) == database
        finally:
            bash.kill()
    until(lambda: not below(home), "the keeper's processes end")
    assert not lives(database)
    assert holders(home) == []


def of_session_leaders(shell: int) -> list[int]:
    """The processes that name the pid *shell* as their last argument."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if command(int(path.parent.name)).rstrip("\0").split("\0")[-1] == str(shell)
    ]


WHO = """
import sys
from proxy.holder import calling_shell
sys.argv[0] = "twiceshy"
print("<", calling_shell(), ">", sep="")
"""


@pytest.mark.parametrize(
    "line", ["$WHO env --run r", 'echo "$($WHO env)"', '''eval "echo '$($WHO env)'"''', "timeout 60 ./twiceshy env -q"]
)
def test_the_calling_shell_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "who").write_text(WHO)
    (tmp_path / "twiceshy").write_text(f'#!/bin/sh\n{sys.executable} {tmp_path}/who "$@"\n')
    (tmp_path / "twiceshy").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "WHO": f"{sys.executable} {tmp_path}/who"}
    # Of two shells whose command lines are alike, the inner one.
    heard = subprocess.run(
        ["bash"], input=f"bash\necho $$\n{line}\n:\n", env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=60,
    ).stdout.split()  # fmt: skip
    assert heard == [heard[0], f"<{heard[0]}>"]
