"""Postgres stopped under live runs: what is asked is held, then refused; nothing is taken over, nothing made twice."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.embedded import Postgres
from tests.kill.launchers import until
from tests.kill.postgres import own_postgres
from tests.stack import Attempt, Stack, stack


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with own_postgres() as made:
        yield made


@dataclass
class Agent:
    """A program of model calls with a note after each, started again from the top when it is refused."""

    made: Stack
    run: str
    steps: int
    attempts: int = 1
    done: bool = False
    refusals: list[tuple[int, float]] = field(default_factory=list)  # status, seconds until it came
    error: Exception | None = None
    pace: threading.Event = field(default_factory=threading.Event)  # the second half may begin

    def go(self) -> None:
        try:
            attempt = self.made.claim(self.run)
            while not self.walk(attempt):
                attempt = self.again()
            self.made.end(attempt, "done", 0)
            self.done = True
        except Exception as error:
            self.error = error

    def walk(self, attempt: Attempt) -> bool:
        for n in range(self.steps):
            chat = {"model": "m", "messages": [{"role": "user", "content": f"{self.run} {n}"}]}
            for path, body in (("/v1/chat/completions", chat), ("/crm/notes", {"text": f"{self.run} {n}"})):
                began = time.monotonic()
                try:
                    status = attempt.ask("POST", self.made.url(path), body, timeout=100).status
                except OSError:  # the end of an answer was held back for longer than record_wait
                    status = 0
                if status // 100 != 2:
                    self.refusals.append((status, time.monotonic() - began))
                    return False
            if n == self.steps // 2:
                self.pace.wait(120)
        return True

    def again(self) -> Attempt:
        """As its launcher would: claim as soon as the database is there."""
        self.attempts += 1
        deadline = time.monotonic() + 120
        while True:
            try:
                return self.made.claim(self.run)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def play(postgres: Postgres, folder: Path, *, count: int, lease: float, wait: float, away: float) -> None:
    """Stop Postgres for *away* seconds under *count* runs. *wait*: how long requests are held (database_wait)."""
    with stack(postgres.dsn, folder, lease=lease, database_wait=wait, poll=0.1) as made:
        made.sandbox.fault(match={"path": "/v1/*"}, times=0, delay=[0.0, 0.05])
        agents = [Agent(made, f"{folder.name}-{n}", 6) for n in range(count)]
        threads = [threading.Thread(target=agent.go, daemon=True) for agent in agents]
        for thread in threads:
            thread.start()
        until(lambda: len(made.received("llm")) >= 4 * count, "all are half way", 60)
        for agent in agents[::2]:
            agent.pace.set()  # these are in the middle of their calls
        _stop(postgres)
        stopped = time.monotonic()
        for agent in agents:
            agent.pace.set()
        until(lambda: time.monotonic() - stopped > away, "the outage is over", away + 10)
        postgres.spawn()
        until(postgres.ready, "Postgres is back")
        for thread in threads:
            thread.join(120)
        assert all(agent.done for agent in agents), [agent.error for agent in agents if not agent.done]
        refused = [refusal for agent in agents for refusal in agent.refusals]
        assert 503 in {status for status, _ in refused} <= {503, 0}
        # The slack is for the machine, not for us.
        assert all(seconds < wait + 10 for status, seconds in refused if status == 503), refused

        asked = [each.body for each in made.received("llm")]
        assert len(asked) == len(set(asked)) == 6 * count
        assert len(made.effects("crm")) == 6 * count
        rows = made.fetch("SELECT outcome, run_id FROM twiceshy.attempt WHERE run_id LIKE $1", f"{folder.name}-%")
        # Each attempt but the last was ended by its own agent's claim; nobody else's clock judged anybody.
        assert len(rows) == sum(agent.attempts for agent in agents)
        assert made.fetch("SELECT FROM twiceshy.run WHERE id LIKE $1 AND status <> 'done'", f"{folder.name}-%") == []


def _stop(postgres: Postgres) -> None:
    """End the server, but keep its port and data."""
    assert postgres.pid is not None
    os.kill(postgres.pid, signal.SIGINT)
    until(lambda: postgres.poll() is not None, "Postgres is stopped")


def test_an_outage_longer_than_the_leases(postgres: Postgres, tmp_path: Path) -> None:
    play(postgres, tmp_path, count=4, lease=1.0, wait=1.0, away=3.0)


@pytest.mark.check_all
def test_forty_seconds_under_twenty_runs(postgres: Postgres, tmp_path: Path) -> None:
    play(postgres, tmp_path, count=20, lease=30.0, wait=20.0, away=40.0)
