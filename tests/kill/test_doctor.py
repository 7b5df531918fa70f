"""``twiceshy doctor`` on programs that nobody changed: what goes past the sidecar is named, and nothing else is.

One keeper, one sidecar and one sandbox over TLS serve the whole module. Agents that connect to the sandbox directly do
not trust its CA; that they connected at all is what matters.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.launch import probes, watcher
from runtime.launch.diagnosis import Outcome
from tests.kill.launchers import Bench, until
from tests.kill.processes import lives
from tests.stack import PROJECT

AGENTS = PROJECT / os.environ.get("AGENTS", ".agents") / "bin" / "python"
STRACE, WHY_NOT = watcher.tracer()
WAYS = [
    pytest.param(("--no-strace",), id="proc"),
    pytest.param((), id="strace", marks=pytest.mark.skipif(STRACE is None, reason=WHY_NOT)),
]


#: The sandbox speaks TLS.
WORLD = {"tls": True}


class Examined:
    """A ``twiceshy doctor --json`` under way."""

    def __init__(self, bench: Bench, flags: Sequence[str], command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proxy.cli", "doctor", "--json", *flags, "--", *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=bench.folder,
            env=bench.world.environment | {"HERE": str(bench.folder)},
        )  # fmt: skip
        bench.started.append(self.process)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def until_said(self, words: str) -> None:
        until(lambda: words in self.said or self.process.poll() is not None, words)
        assert words in self.said, self.said

    def result(self) -> tuple[int, dict[str, Any]]:
        """Exit code and what was found."""
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        code = self.process.wait(60)
        self._reader.join()
        assert text, self.said
        found = json.loads(text)
        assert code == (0 if found["well"] else 1), found
        return code, found


def doctor(bench: Bench, *command: str, flags: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    return Examined(bench, flags, command or bench.command).result()


def agents_python() -> str:
    if not AGENTS.exists():
        pytest.skip(f"{AGENTS} is not there: `make test` makes it")
    return str(AGENTS)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def causes(found: dict[str, Any]) -> dict[str, str]:
    """What went past the sidecar: cause -> the last part of the place in the program."""
    return {each["cause"]: str(each["at"]).rpartition("/")[2] for each in found["past"]}


# ---- a program that is well


@pytest.mark.parametrize(
    "way", [(), pytest.param(("--no-strace",), marks=pytest.mark.check_all)], ids=["as it is", "proc"]
)
def test_a_program_all_of_which_is_journalled(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent("""
order(); call("GET", "/pantry")
with urllib.request.urlopen("https://doctor.twiceshy.internal/") as answer: met = json.load(answer)
assert met["run"] == os.environ["TWICESHY_RUN"], met
print("this is no JSON")
""")
    code, found = doctor(bench, flags=way)
    assert code == 0, found
    assert found["past"] == found["tls_failed"] == []
    assert found["arrived"] == {f"127.0.0.1:{bench.sandbox.port}": {"journalled": 2}}
    assert found["ended"] == "exit code 0"
    assert found["interpreter"].startswith("Python 3.")
    fared = {(each["client"], each["scheme"]): each["outcome"] for each in found["probes"]}
    assert fared["urllib", "http"] == fared["urllib", "https"] == "reached"
    assert fared["aiohttp", "https"] == "reached"
    # The run is one like any other, and its journal stays.
    assert bench.made("orders") == 1
    assert bench.world.status(found["run"]) == "done"
    assert "/orders" in bench.verb("show", found["run"]).stdout


async def test_nobody_is_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WITHIN", 0.2)
    (tmp_path / "python").write_text('#!/bin/sh\necho $$ > "$0.pid"\nsleep 1000\n')
    (tmp_path / "python").chmod(0o755)
    who, [asked] = await probes.ask([str(tmp_path / "python"), "agent.py"], os.environ, run="r", sidecar="s")
    assert who == str(tmp_path / "python")
    assert (asked.outcome, asked.words) == (Outcome.FAILED, "nothing was said within 0.2 s")
    assert not lives(int((tmp_path / "python.pid").read_text()))


# ---- what goes past it

PAST = """
import asyncio, socket, subprocess, threading
import aiohttp, urllib3
port = int(URL.rpartition(":")[2])
urllib3.disable_warnings()
def pool(): urllib3.PoolManager(cert_reqs="CERT_NONE").request("GET", URL + "/any/held")
def session():
    async def main():
        async with aiohttp.ClientSession(trust_env=False) as session:
            async with session.get(URL + "/any/held", ssl=False) as answer: await answer.read()
    asyncio.run(main())
def raw():
    with socket.create_connection(("127.0.0.1", port)): until("seen")
threads = [threading.Thread(target=each) for each in (pool, session, raw)]
for thread in threads: thread.start()
subprocess.run(["sh", "-c", sys.argv[1]], check=True)
for thread in threads: thread.join()
order()
"""
FETCH = """env -u NODE_OPTIONS NODE_TLS_REJECT_UNAUTHORIZED=0 node -e '
fetch(process.env.SANDBOX_URL + "/any/held").then((answer) => process.exit(answer.status === 200 ? 0 : 1))'"""


@pytest.mark.parametrize("way", WAYS)
def test_each_client_that_goes_past_it_is_named(bench: Bench, way: tuple[str, ...]) -> None:
    """aiohttp without trust_env, urllib3.PoolManager, a raw socket; a grandchild: Node's fetch without the preload."""
    python, node = agents_python(), program("node")
    bench.sandbox.fault(match={"path": "/any/held"}, times=3, hold="all")
    bench.agent(PAST)
    under_way = Examined(bench, way, [python, str(bench.program), FETCH])
    bench.sandbox.wait_held("all", 3)
    under_way.until_said(f"{Path(node).name} -e")  # said when it is seen, not at the end
    bench.sandbox.release("all")
    bench.touch("seen")
    code, found = under_way.result()
    assert code == 1, found
    named = causes(found)
    lines = {line.partition("(")[0]: n for n, line in enumerate(bench.program.read_text().splitlines(), 1)}
    assert named == {
        "urllib3.PoolManager": f"agent.py:{lines['def pool']}",
        "aiohttp": f"agent.py:{lines['def session'] + 3}",
        "a raw socket": f"agent.py:{lines['def raw'] + 1}",
        "Node without the preload": "None",
    }
    for each in found["past"]:
        assert (each["address"], each["port"]) == ("127.0.0.1", bench.sandbox.port)
        assert each["remedy"]
    assert all(str(bench.program) in each["command"] for each in found["past"] if "Node" not in each["cause"])
    assert found["arrived"] == {f"127.0.0.1:{bench.sandbox.port}": {"journalled": 1}}


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [("-I",), ("-E",), ("env", "-u", "PYTHONPATH")], ids=" ".join)
def test_aiohttp_without_our_sitecustomize(bench: Bench, way: tuple[str, ...], how: tuple[str, ...]) -> None:
    python = agents_python()
    bench.sandbox.fault(match={"path": "/any/held"}, hold="one")
    bench.agent("""
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession() as session:
        async with session.get(URL + "/any/held", ssl=False) as answer: await answer.read()
asyncio.run(main())
""")
    command = [*how, python, str(bench.program)] if how[0] == "env" else [python, *how, str(bench.program)]
    under_way = Examined(bench, way, command)
    bench.sandbox.wait_held("one")
    under_way.until_said("past the sidecar")
    bench.sandbox.release("one")
    code, found = under_way.result()
    assert code == 1
    assert list(causes(found)) == ["aiohttp without sitecustomize"]
    # The probe was started as the program was.
    fared = {each["client"]: each["outcome"] for each in found["probes"]}
    assert fared["aiohttp"] == "past"
    assert fared["urllib"] in ("reached", "distrusts")


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_what_a_child_inherits_is_no_connection_of_its_own(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent("""
import os, socket, subprocess
with socket.create_connection(("127.0.0.1", int(URL.rpartition(":")[2]))):
    if not os.fork(): until("seen"), os._exit(0)
    until("seen")
os.wait()
""")
    under_way = Examined(bench, way, bench.command)
    under_way.until_said("past the sidecar")
    watched = len(bench.agents())
    assert watched == 2 + (STRACE is not None and not way)
    bench.touch("seen")
    code, found = under_way.result()
    assert code == 1, found
    assert [each["cause"] for each in found["past"]] == ["a raw socket"]


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_an_environment_that_was_replaced(bench: Bench, way: tuple[str, ...]) -> None:
    bench.sandbox.fault(match={"path": "/pantry"}, hold="one")
    bench.agent("import ssl; ssl._create_default_https_context = ssl._create_unverified_context\n"
                'call("GET", "/pantry")')  # fmt: skip
    keep = [f"{name}={bench.world.environment[name]}" for name in ("SANDBOX_URL", "PATH")]
    command = ["env", "-i", *keep, f"HERE={bench.folder}", *bench.command]
    under_way = Examined(bench, way, command)
    bench.sandbox.wait_held("one")
    under_way.until_said("past the sidecar")
    bench.sandbox.release("one")
    code, found = under_way.result()
    assert code == 1
    assert causes(found) == {"environment replaced": "None"}
    assert {each["outcome"] for each in found["probes"]} == {"past"}


@pytest.mark.check_all
def test_nodes_probes(bench: Bench) -> None:
    """With the preload Node's clients are led; without it all of them go past, and that alone is a finding."""
    node = program("node")
    (bench.folder / "agent.js").write_text("fetch(process.env.SANDBOX_URL + '/pantry').then(() => process.exit(0))")
    code, found = doctor(bench, node, str(bench.folder / "agent.js"))
    assert code == 0, found
    assert {each["outcome"] for each in found["probes"]} == {"reached"}
    assert {each["client"] for each in found["probes"]} == {"fetch", "https"}
    (bench.folder / "agent.js").write_text("")
    code, found = doctor(bench, "env", "-u", "NODE_OPTIONS", "-u", "NODE_USE_ENV_PROXY", node,
                         str(bench.folder / "agent.js"))  # fmt: skip
    assert code == 1
    assert {each["outcome"] for each in found["probes"]} == {"past"}
    assert found["past"] == []


@pytest.mark.check_all
@pytest.mark.skipif(STRACE is None, reason=WHY_NOT)
def test_what_lasts_no_time_and_what_fails_is_seen_by_strace(bench: Bench) -> None:
    """By programs that tell nothing themselves."""
    curl = program("curl")
    script = f"{curl} -sk --noproxy '*' -o /dev/null $SANDBOX_URL/any/x; {curl} -s --noproxy '*' http://127.0.0.1:1/; :"
    code, found = doctor(bench, "sh", "-c", script)
    assert code == 1
    assert sorted((each["cause"], each["port"]) for each in found["past"]) == [
        ("curl", 1), ("curl", bench.sandbox.port),
    ]  # fmt: skip
    assert [each["client"] for each in found["probes"]] == ["curl", "curl"]
    assert {each["outcome"] for each in found["probes"]} == {"reached"}


@pytest.mark.check_all
@pytest.mark.skipif(STRACE is None, reason=WHY_NOT)
def test_datagrams(bench: Bench) -> None:
    """HTTP/3 is a finding. Where names are looked up, and all else, is told."""
    bench.agent("""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for port in (443, 53, 8125): sock.sendto(b"x", ("127.0.0.1", port))
    sock.connect(("127.0.0.1", 444))  # sends nothing
""")
    code, found = doctor(bench)
    assert code == 1
    assert [(each["cause"], each["transport"], each["port"]) for each in found["past"]] == [("HTTP/3", "udp", 443)]
    assert [each["port"] for each in found["lookups"]] == [53]
    assert [each["port"] for each in found["datagrams"]] == [8125]


# ---- TLS


@pytest.mark.check_all
def test_a_program_that_does_not_trust_the_ca(bench: Bench) -> None:
    bench.agent("""
try: order()
except urllib.error.URLError as error: assert "CERTIFICATE_VERIFY_FAILED" in str(error), error
""")
    code, found = doctor(bench, "env", "-u", "SSL_CERT_FILE", sys.executable, "-I", str(bench.program))
    assert code == 1
    [hint] = found["tls_failed"]
    assert hint.startswith("127.0.0.1: this client does not trust the CA")
    assert found["past"] == []
    fared = {(each["client"], each["scheme"]): each["outcome"] for each in found["probes"]}
    assert (fared["urllib", "http"], fared["urllib", "https"]) == ("reached", "distrusts")


# ---- what is no finding

CONNECTS = """
import socket
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))): until("seen")
"""
OWN = """
import socket
mine = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(mine.getsockname()), mine.accept()[0]: pass
"""


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_knows_is_a_finding_unless_it_is_said_to_be_well(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent(CONNECTS)
    port = str(bench.sandbox.port)
    under_way = Examined(bench, way, [*bench.command, port])
    under_way.until_said("past the sidecar")
    bench.touch("seen")
    code, found = under_way.result()
    assert code == 1
    assert [(each["address"], each["port"]) for each in found["past"]] == [("127.0.0.1", int(port))]
    for address in (f"127.0.0.1:{port}", f"localhost:{port}", f":{port}", "127.0.0.0/8"):
        code, found = doctor(bench, *bench.command, port, flags=[*way, "--allow", address])
        assert code == 0, found
        assert [each["port"] for each in found["allowed"]] == [int(port)]


@pytest.mark.check_all
@pytest.mark.skipif(STRACE is None, reason=WHY_NOT)
def test_what_the_program_itself_listens_at_is_none(bench: Bench) -> None:
    bench.agent(OWN)
    code, found = doctor(bench)
    assert code == 0, found
    assert found["past"] == []


@pytest.mark.check_all
@pytest.mark.skipif(STRACE is None, reason=WHY_NOT)
def test_a_database_of_this_machine(bench: Bench) -> None:
    bench.agent("""
import socket
for port in (5432, 6379):
    try: socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError: pass
""")
    code, found = doctor(bench)
    assert code == 0, found
    assert [(each["port"], each["speaks"]) for each in found["services"]] == [(5432, "PostgreSQL"), (6379, "Redis")]


# ---- its end

DAEMON = """
import signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(HERE + "/daemon", "w") as file: file.write(str(os.getpid()))
        os.rename(HERE + "/daemon", HERE + "/daemon.pid")
        while True: signal.pause()
    os._exit(0)
until("daemon.pid")
"""


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_what_outlives_the_program_is_ended(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent(DAEMON)
    code, found = doctor(bench, flags=way)
    assert code == 0, found
    pid = int((bench.folder / "daemon.pid").read_text())
    until(lambda: not lives(pid), "the daemon ends")


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_fails_is_started_once(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent("order(); sys.exit(7)")
    code, found = doctor(bench, flags=way)
    assert (code, found["ended"], bench.starts) == (0, "exit code 7", 1)
    assert any("after its end" in note for note in found["notes"])
    assert bench.world.status(found["run"]) == "failed"
    bench.agent("order(); os.kill(os.getpid(), 9)")
    code, found = doctor(bench, flags=way)
    assert (code, found["ended"], bench.starts) == (0, "killed by SIGKILL", 2)


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_an_end(bench: Bench, way: tuple[str, ...]) -> None:
    bench.agent('order(); open(HERE + "/began", "w").close(); until("never")')
    under_way = Examined(bench, way, bench.command)
    until((bench.folder / "began").exists, "it began")
    under_way.process.terminate()
    code, found = under_way.result()
    assert (code, found["ended"]) == (0, "interrupted")
    assert found["arrived"] == {f"127.0.0.1:{bench.sandbox.port}": {"journalled": 1}}
    code, found = doctor(bench, flags=[*way, "--seconds", "0.5"])
    assert (code, found["ended"]) == (0, "ended after 0.5 s")


@pytest.mark.check_all
@pytest.mark.parametrize("way", WAYS)
def test_doctor_dies_and_so_does_the_program(bench: Bench, way: tuple[str, ...]) -> None:
    """strace with it."""
    bench.agent('open(HERE + "/began", "w").close(); until("never")')
    under_way = Examined(bench, way, bench.command)
    until((bench.folder / "began").exists, "it began")
    assert bench.agents()
    under_way.process.kill()
    until(lambda: not bench.agents(), "no agent is left")


@pytest.mark.check_all
def test_a_run_that_stops_is_told_of(bench: Bench) -> None:
    bench.sandbox.fault(match={"path": "/email/send"}, drop="after")
    bench.agent("try: mail()\nexcept urllib.error.HTTPError: until('never')")
    code, found = doctor(bench)
    assert (code, found["ended"]) == (0, "the run is ambiguous")
    assert found["arrived"] == {f"127.0.0.1:{bench.sandbox.port}": {"journalled": 1}}
    assert any(f"twiceshy show {found['run']}" in note for note in found["notes"])


@pytest.mark.check_all
def test_it_is_interrupted_before_the_program_was_started(bench: Bench) -> None:
    (bench.folder / "python").write_text(f"#!/bin/sh\ntouch {bench.folder}/asked\nexec sleep 1000\n")
    (bench.folder / "python").chmod(0o755)
    under_way = Examined(bench, (), [str(bench.folder / "python"), str(bench.program)])
    until((bench.folder / "asked").exists, "a probe is under way")
    under_way.process.send_signal(signal.SIGINT)
    assert under_way.process.wait(60) == 128 + signal.SIGINT
    assert not bench.agents()


@pytest.mark.check_all
def test_words_for_people_stand_on_standard_error(bench: Bench) -> None:
    bench.agent("print('its own'); order()")
    done = bench.verb("doctor", "--", *bench.command)
    assert (done.returncode, done.stdout) == (0, "its own\n")
    assert "done for real" in done.stderr
    assert f"127.0.0.1:{bench.sandbox.port}  1 journalled" in done.stderr
    assert done.stderr.splitlines()[-1] == "✔ nothing that was seen went past the sidecar"
