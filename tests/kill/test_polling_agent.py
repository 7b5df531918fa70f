"""The sidecar alone SIGKILLed, under an agent that polls, mails, and takes no refusal for an answer."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from bench.crashes import SIDECAR, Crashes, Mode
from runtime import runs
from sandbox.client import Sandbox
from sandbox.stage import Program, Stage, kill
from tests.apart import ask_database

#: Asks for an order's status, which is another one each time, and mails it. Asks again whatever it is told.
AGENT = """
import http.client, json, os, sys, time, urllib.error, urllib.request
URL, HERE = os.environ["SANDBOX_URL"], os.environ["HERE"]
with open(HERE + "/starts", "a") as file: file.write("x")
seen = open(f"{HERE}/seen-{os.path.getsize(HERE + '/starts')}", "a", buffering=1)
def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            print("refused", error.headers["Twiceshy-Error"], file=seen)
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.02)
for turn in range(1, int(sys.argv[1]) + 1):
    polled = call("GET", "/orders/A-7/status")
    print("polled", polled["asked"], polled["status"], file=seen)
    mail = call("POST", "/email/send", {"to": "a@example.org", "text": f"{polled['asked']} {polled['status']}"})
    print("mailed", mail["id"], file=seen)
    while os.path.exists(f"{HERE}/stay-{turn}"): time.sleep(0.01)
"""
#: ``twiceshy`` to which news of a sidecar come late, as on a machine that is busy: once HERE/news is there.
LATE = """
import asyncio, os, sys
from proxy import cli
from runtime.keeping import Keeping
HERE, note = os.environ["HERE"], Keeping._note
async def late(self, message):
    while self._is_up() and not os.path.exists(HERE + "/news"):
        await asyncio.sleep(0.01)
    await note(self, message)
    if os.path.exists(HERE + "/news") and message["sidecar"]: open(HERE + "/heard", "w")
Keeping._note = late
sys.exit(cli.main())
"""
POLL = {"service": "orders", "method": "GET"}


class Polling:
    """A polling agent under ``twiceshy run``, its sandbox, and who may be killed."""

    def __init__(self, stage: Stage, dsn: str) -> None:
        self.stage = stage
        self.dsn = dsn
        self.folder = stage.folder
        self.sandbox: Sandbox = stage.sandbox("sandbox")
        self.crashes = Crashes(stage, Mode.DURABLE, DATABASE_URL=dsn)
        self.program = self.folder / "agent.py"
        self.program.write_text(AGENT)
        self.crashes.ready()

    @property
    def environment(self) -> dict[str, str]:
        return {"SANDBOX_URL": self.sandbox.url, "HERE": str(self.folder)}

    def run(self, turns: int) -> Program:
        command = ("run", "--run", "polling", "--", sys.executable, str(self.program), str(turns))
        return self.crashes.start(*command, **self.environment)

    def kill_sidecar(self) -> None:
        kill(self.stage.find(str(self.crashes.home), *SIDECAR))

    def kill_agent(self) -> None:
        kill(self.stage.find("TWICESHY_RUN=polling\0", str(self.program)))

    @property
    def starts(self) -> int:
        path = self.folder / "starts"
        return path.stat().st_size if path.exists() else 0

    def seen(self, start: int, what: str) -> list[str]:
        """What the agent noted when it was started for the *start*-th time."""
        path = self.folder / f"seen-{start}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(what)]

    def outcomes(self) -> list[str | None]:
        return [attempt.outcome for attempt in ask_database(self.dsn, runs.attempts, "polling")]

    def sent(self) -> list[tuple[str, str]]:
        return [(each.facts["mail"]["id"], each.facts["mail"]["text"]) for each in self.sandbox.effects("email")]


@pytest.fixture
def polling(dsn: str) -> Iterator[Polling]:
    with Stage() as stage:
        yield Polling(stage, dsn)


def test_a_sidecar_killed_again_and_again(polling: Polling) -> None:
    """No wrong replay, no lost and no second mail."""
    sandbox, wait = polling.sandbox, polling.crashes.wait
    sandbox.faults({"match": POLL, "nth": 2, "hold": "second"}, {"match": POLL, "nth": 5, "hold": "fifth"})
    stay = polling.folder / "stay-3"
    stay.touch()
    launcher = polling.run(5)

    # Inside a poll, with a launcher that is slow to see it: the agent hears it from the new sidecar, often.
    wait(launcher, lambda: sandbox.waiting("second") > 0, "the second poll")
    os.kill(launcher.process.pid, signal.SIGSTOP)
    polling.kill_sidecar()
    wait(launcher, lambda: len(polling.seen(1, "refused")) > 2, "the agent is refused")
    os.kill(launcher.process.pid, signal.SIGCONT)
    wait(launcher, lambda: len(polling.seen(2, "mailed")) == 3, "the agent has been started again")
    assert set(polling.seen(1, "refused")) == {"sidecar-changed"}

    # Between two calls: nobody tells the agent, and its launcher starts it again.
    polling.kill_sidecar()
    wait(launcher, lambda: len(polling.seen(3, "mailed")) == 3, "the agent has been started again")
    stay.unlink()

    # Inside a poll again, with a launcher that is awake.
    wait(launcher, lambda: sandbox.waiting("fifth") > 0, "the fifth poll")
    polling.kill_sidecar()
    assert launcher.wait(60) == 0, launcher.lines

    assert polling.outcomes() == ["handed_over", "handed_over", "handed_over", "done"]
    polled, mailed = polling.seen(4, "polled"), polling.seen(4, "mailed")
    # The second and the fifth poll got lost before anybody had their answers.
    assert polled == ["1 received", "3 packed", "4 shipped", "6 shipped", "7 shipped"]
    assert polling.sent() == list(zip(mailed, polled, strict=True))
    for start in (1, 2, 3):
        assert polling.seen(start, "polled") == polled[: len(polling.seen(start, "polled"))]
        assert polling.seen(start, "mailed") == mailed[: len(polling.seen(start, "mailed"))]


def test_a_sidecar_killed_inside_a_mail(polling: Polling) -> None:
    """Nobody can say whether that one went out: it is not sent again, whatever the agent does."""
    sandbox, wait = polling.sandbox, polling.crashes.wait
    sandbox.fault(match={"service": "email"}, nth=2, hold="mail")
    launcher = polling.run(3)
    wait(launcher, lambda: sandbox.waiting("mail") > 0, "the second mail")
    polling.kill_sidecar()
    assert launcher.wait(60) == 3, launcher.lines
    assert polling.outcomes() == ["handed_over", "stopped"]
    assert [text for _, text in polling.sent()] == ["1 received", "2 picking"]
    assert set(polling.seen(2, "refused")) == {"ambiguous"}


def test_news_of_a_sidecar_that_come_late_are_no_news(polling: Polling) -> None:
    """An agent that died is no victim of a sidecar that was replaced before it was started."""
    wait = polling.crashes.wait
    for turn in (1, 2):
        (polling.folder / f"stay-{turn}").touch()
    command = ("run", "--run", "polling", "--", sys.executable, str(polling.program), "2")
    environment = polling.crashes.environment | polling.environment
    launcher = polling.stage.start((sys.executable, "-c", LATE, *command), lambda _: None, **environment)
    wait(launcher, lambda: len(polling.seen(1, "mailed")) == 1, "the first mail")
    polling.kill_sidecar()
    polling.kill_agent()
    (polling.folder / "stay-1").unlink()
    wait(launcher, lambda: len(polling.seen(2, "mailed")) == 2, "the second mail, of an agent that was started again")
    (polling.folder / "news").touch()
    wait(launcher, (polling.folder / "heard").exists, "the launcher hears of the new sidecar")
    polling.kill_agent()
    (polling.folder / "stay-2").unlink()
    assert launcher.wait(60) == 0, launcher.lines
    assert polling.outcomes() == ["handed_over", "died", "done"]
    assert len(polling.sent()) == 2
