"""Values, sleeps and event waits at twiceshy.internal: recorded once, and the same in every attempt."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from runtime import events
from tests.proxy.waiting import AGENT_API, ask, call, round_of, send, until_due, until_open
from tests.stack import Attempt, Stack, stack


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that looks often, and parks nothing."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), poll=0.1, hold=60) as made:
        yield made


# ---- values


def test_values_are_the_same_in_the_next_attempt(shared: Stack) -> None:
    def walk(attempt: Attempt) -> list[Any]:
        found = [ask(attempt, path).json() for path in ("/now", "/now", "/random", "/random", "/uuid")]
        found.append(ask(attempt, "/random", {"bytes": 33}).json())
        found.append(attempt.ask("GET", AGENT_API + "/uuid").json())
        return found

    first = walk(shared.claim("values"))
    assert len({str(each) for each in first}) == len(first)
    assert datetime.fromisoformat(first[0]["now"]) < datetime.fromisoformat(first[1]["now"])
    assert 0 <= first[2]["random"] < 1
    assert UUID(first[4]["uuid"]).version == 4
    assert len(base64.b64decode(first[5]["random"])) == 33
    assert walk(shared.claim("values")) == first
    shared.restart()
    again = shared.claim("values")
    assert walk(again) == first
    assert ask(again, "/now").json()["now"] > first[1]["now"]


# ---- sleeps


def test_a_sleep_takes_its_time_and_is_recorded(shared: Stack) -> None:
    attempt, began = shared.claim("sleep"), time.monotonic()
    slept = ask(attempt, "/sleep", {"seconds": 0.5})
    assert 0.5 <= time.monotonic() - began < 5
    again = ask(shared.claim("sleep"), "/sleep", {"seconds": 0.5})
    assert again.replayed
    assert again.body == slept.body
    past = ask(attempt := shared.claim("past"), "/sleep", {"until": "2001-01-01T00:00:00+01:00"})
    assert past.json() == {"slept_until": "2000-12-31T23:00:00.000000Z"}
    assert not ask(attempt, "/sleep", {"seconds": 0}).replayed


def test_a_sleep_goes_on_in_the_next_attempt_and_under_the_next_sidecar(shared: Stack) -> None:
    began = time.monotonic()
    first = shared.claim("dozing")
    first.in_background("POST", AGENT_API + "/sleep", {"seconds": 3})
    until_open(shared, "dozing")
    first.die()
    second = shared.claim("dozing")
    second.in_background("POST", AGENT_API + "/sleep", {"seconds": 3})
    shared.restart()
    third = shared.claim("dozing")
    slept = ask(third, "/sleep", {"seconds": 3})
    assert 3 <= time.monotonic() - began < 6
    [row] = shared.fetch("SELECT begun_at, deadline FROM twiceshy.step WHERE run_id = 'dozing'")
    assert datetime.fromisoformat(slept.json()["slept_until"]) == row["deadline"]
    assert (row["deadline"] - row["begun_at"]).total_seconds() == 3
    assert len(shared.fetch("SELECT FROM twiceshy.answer WHERE run_id = 'dozing'")) == 1


# ---- waits


@pytest.mark.parametrize("when", ["before", "during", "while nobody waits"])
def test_an_event_is_taken_once_whenever_it_comes(shared: Stack, when: str) -> None:
    run = f"event-{when.replace(' ', '-')}"
    attempt = shared.claim(run)
    payload = b'{"by":  "ann", "n": 1e400, "n": "\\u0000"}'
    if when == "before":
        send(shared, run, "approval", payload, "one")
    waiting = attempt.in_background("POST", AGENT_API + "/events/approval/wait", {"timeout": 60})
    if when == "during":
        until_open(shared, run)
        send(shared, run, "approval", payload, "one")
    if when == "while nobody waits":
        until_open(shared, run)
        attempt.die()
        send(shared, run, "approval", payload, "one")
        attempt = shared.claim(run)
        waiting = attempt.in_background("POST", AGENT_API + "/events/approval/wait", {"timeout": 60})
    reply = waiting.result()
    event = reply.json()["event"]
    assert (event["id"], event["name"]) == ("one", "approval")
    assert payload in reply.body
    assert not send(shared, run, "approval", payload, "one").fresh
    assert ask(attempt, "/events/approval/wait", {"timeout": 0}).json() == {"timeout": True}
    later = shared.claim(run)
    assert ask(later, "/events/approval/wait", {"timeout": 60}).body == reply.body
    assert ask(later, "/events/approval/wait", {"timeout": 0}).json() == {"timeout": True}


def test_a_timeout_is_recorded_and_stays_one(shared: Stack) -> None:
    attempt = shared.claim("timeout")
    assert ask(attempt, "/events/go/wait", {"timeout": 0.2}).json() == {"timeout": True}
    send(shared, "timeout", "go")
    assert ask(later := shared.claim("timeout"), "/events/go/wait", {"timeout": 0.2}).json() == {"timeout": True}
    assert "event" in ask(later, "/events/go/wait", {"timeout": 0.2}).json()


def test_ten_waits_and_ten_senders_at_once(shared: Stack) -> None:
    attempt = shared.claim("many")
    with ThreadPoolExecutor(20) as threads:
        waits = [threads.submit(ask, attempt, "/events/go/wait", None, f"w{n}") for n in range(10)]
        until_open(shared, "many", 5)
        sent = [threads.submit(send, shared, "many", "go", b"%d" % n, f"e{n}") for n in range(10)]
        got = {f"w{n}": wait.result().json()["event"] for n, wait in enumerate(waits)}
        assert all(each.result().fresh for each in sent)
    assert sorted(event["payload"] for event in got.values()) == list(range(10))
    later = shared.claim("many")
    assert {f"w{n}": ask(later, "/events/go/wait", None, f"w{n}").json()["event"] for n in range(10)} == got
    taken = shared.fetch("SELECT id, consumed_by FROM twiceshy.event WHERE run_id = 'many'")
    assert {row["consumed_by"]: row["id"] for row in taken} == {key: event["id"] for key, event in got.items()}


def test_an_event_from_ten_senders_is_taken_once_whoever_dies(shared: Stack) -> None:
    for n in range(3):
        round_of(shared, n, sidecar_dies=False)


def test_a_timeout_and_an_event_at_the_same_instant(shared: Stack) -> None:
    """One of the two is recorded and stays; what was not taken is there for the next wait."""
    attempt, ends = shared.claim("instant"), {}
    for n in range(5):
        key, path = f"w{n}", f"/events/go{n}/wait"
        waiting = attempt.in_background("POST", AGENT_API + path, {"timeout": 0.1}, {"Twiceshy-Step": key})
        until_due(shared, "instant", key)
        call(shared, events.send, "instant", f"go{n}", b"1", "e", limit=10)
        ends[path] = waiting.result().json()
        left = ask(attempt, path, {"timeout": 0}, key + "-again").json()
        assert ("event" in ends[path]) != ("event" in left), (ends[path], left)
    later = shared.claim("instant")
    for n, (path, end) in enumerate(ends.items()):
        assert ask(later, path, {"timeout": 0.1}, f"w{n}").json() == end


@pytest.mark.check_all
@pytest.mark.parametrize("point", ["before-record", "recorded"])
def test_a_sidecar_that_dies_around_the_record_takes_an_event_once(dsn: str, tmp_path: Path, point: str) -> None:
    with stack(dsn, tmp_path, poll=0.1, failpoint=f"{point}:1") as made:
        attempt = made.claim("r")
        send(made, "r", "go", b"1", "one")
        with pytest.raises(OSError):
            ask(attempt, "/events/go/wait")
        del made.settings["failpoint"]
        made.restart()
        again = made.claim("r")
        assert ask(again, "/events/go/wait").json()["event"]["id"] == "one"
        assert ask(again, "/events/go/wait", {"timeout": 0}).json() == {"timeout": True}
        assert ask(made.claim("r"), "/events/go/wait").json()["event"]["id"] == "one"


def test_a_client_that_gave_up_waits_on_under_the_same_step(shared: Stack) -> None:
    attempt = shared.claim("impatient")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            attempt.ask("POST", AGENT_API + "/events/go/wait", timeout=0.3)
    send(shared, "impatient", "go", id="one")
    assert ask(attempt, "/events/go/wait").json()["event"]["id"] == "one"
    assert len(shared.fetch("SELECT FROM twiceshy.step WHERE run_id = 'impatient'")) == 1


def test_what_is_malformed_is_refused(shared: Stack) -> None:
    attempt = shared.claim("malformed")
    for path, body in (
        ("/sleep", {}), ("/sleep", {"seconds": -1}), ("/sleep", {"seconds": 1e300}), ("/sleep", {"seconds": True}),
        ("/sleep", {"seconds": 1, "until": "2026-01-01T00:00:00Z"}), ("/sleep", {"until": "2026-01-01"}),
        ("/sleep", {"until": 5}), ("/sleep", {"secs": 1}), ("/random", {"bytes": 0}), ("/random", {"bytes": 1.5}),
        ("/now", {"bytes": 1}), ("/events/go/wait", {"timeout": "1"}), ("/events/a%2Fb/wait", {}),
        ("/events/a%0d%0ab/wait", {}), ("/events/" + "x" * 201 + "/wait", {}), ("/events//wait", {}),
    ):  # fmt: skip
        reply = ask(attempt, path, body)
        assert (reply.status, reply.error) == (400, "bad-request"), (path, body)
    assert shared.fetch("SELECT FROM twiceshy.step WHERE run_id = 'malformed'") == []
