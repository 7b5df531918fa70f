"""A run that is named without a token: the attempt is the client's process group (DESIGN §2)."""

from collections.abc import Iterator

import pytest

from proxy import peers
from tests.proxy.speakers import CHAT, FORM, INTERNAL, MAIL, RESULT, Script, Speaker, order, status
from tests.stack import Attempt, Stack, stack

# ---- without a token: process groups


def test_the_next_group_goes_on_where_a_killed_one_was(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, hold=run)
    with Speaker(shared, run) as first:
        live = first.ask("POST", "/orders", order())
        first.begin("POST", "/email/send", MAIL)
        shared.sandbox.wait_held(run)
        first.kill()
    with Speaker(shared, run) as second:
        again = second.ask("POST", "/orders", order())
        assert (again.replayed, again.body) == (True, live.body)
        second.begin("POST", "/email/send", MAIL)
        with Speaker(shared, run) as third:  # who waits for the mail lives
            assert third.ask("POST", "/email/send", MAIL).error == "fenced"
        shared.sandbox.release(run)
        assert second.answer().status == 202
        report = second.ask("GET", "http://twiceshy.internal/attempt").json()
    assert (report["attempt"], report["replayed"], report["joined"], report["live"]) == (2, 1, 1, 0)
    assert [each.service for each in shared.effects()] == ["orders", "email"]


def test_a_second_group_is_fenced_while_the_first_lives(shared: Stack, run: str) -> None:
    with Speaker(shared, run) as first, Speaker(shared, run) as second:
        assert first.ask("POST", "/orders", order()).status == 201
        for method, path, body in (("POST", "/orders", order(2)), ("POST", "/v1/chat/completions", CHAT)):
            reply = second.ask(method, path, body)
            assert (reply.status, reply.error) == (423, "fenced")
        assert str(first.pid) in second.ask("GET", "/pantry").json()["detail"]
        assert second.ask("POST", "/orders", order(2), {"Twiceshy-Step": "named"}).error == "fenced"
        assert first.ask("POST", "/email/send", MAIL).status == 202  # it was not disturbed
        first.kill()
        assert second.ask("POST", "/orders", order()).replayed
    assert [each.service for each in shared.effects()] == ["orders", "email"]


def test_a_group_lives_while_one_of_it_does(shared: Stack, run: str) -> None:
    with Script() as worker, Speaker(shared, run) as another:
        first, second = worker.speaker(shared, run), worker.speaker(shared, run)
        assert first.ask("POST", "/orders", order(1)).status == 201
        worker.end_leader()
        assert second.ask("POST", "/orders", order(2)).status == 201
        assert another.ask("POST", "/orders", order(3)).error == "fenced"
        first.kill()
        assert another.ask("POST", "/orders", order(3)).error == "fenced"
        second.kill()
        assert another.ask("POST", "/orders", order(2)).replayed
    assert len(shared.effects()) == 2


def test_the_processes_of_a_worker_are_one_attempt(shared: Stack, run: str) -> None:
    with Script() as worker:
        speakers = [worker.speaker(shared, run) for _ in range(3)]
        for n, speaker in enumerate(speakers * 2):
            assert speaker.ask("POST", "/orders", order(n)).status == 201
            assert speaker.ask("GET", INTERNAL).json()["attempt"] == 1
        # The same one effect of two of them: nobody can say whether it is wanted twice.
        assert speakers[1].ask("POST", "/orders", order(0)).error == "no-attempt"
    assert len(shared.effects()) == 6


def test_in_a_scripts_loop_only_reads_go_on(shared: Stack, run: str) -> None:
    with Script() as loop:
        first = loop.speaker(shared, run)
        assert first.ask("POST", "/v1/chat/completions", CHAT).status == 200
        assert first.ask("POST", "/orders", order()).status == 201
        first.kill()
        second = loop.speaker(shared, run)
        assert second.ask("GET", "/pantry").status == 200
        for path, body in (("/v1/chat/completions", CHAT), ("/orders", order()), ("/orders", order(2)), ("/any", MAIL)):
            reply = second.ask("POST", path, body)
            assert (reply.status, reply.error) == (428, "no-attempt")
            assert reply.headers["x-should-retry"] == "false"
            for way in ("Twiceshy-Step", f"twiceshy run --run {run}", f"twiceshy claim {run}"):
                assert way in reply.json()["detail"]
        assert second.ask("PUT", RESULT, {}).error == "no-attempt"
        assert second.ask("GET", "/pantry").status == 200
        granting = second.ask("POST", "/any/token", "grant_type=client_credentials", FORM)
        assert (granting.status, granting.error) == (200, None)
        # One of the ways out.
        assert second.ask("POST", "/orders", order(3), {"Twiceshy-Step": "third"}).status == 201
        second.kill()
        assert loop.speaker(shared, run).ask("POST", "/orders", order(3), {"Twiceshy-Step": "third"}).replayed
    with Speaker(shared, run) as started_again:
        assert started_again.ask("POST", "/orders", order()).replayed
    assert [each.service for each in shared.effects()].count("orders") == 2


# ---- without a token: retried inside one living process


@pytest.mark.parametrize(("path", "body"), [("/orders", order()), ("/email/send", MAIL), ("/any/x", MAIL)])
def test_an_equal_effect_of_a_living_process_is_refused(shared: Stack, run: str, path: str, body: object) -> None:
    me = Attempt(run, None, shared.sidecar.port)
    assert me.ask("POST", shared.url(path), body).status // 100 == 2  # type: ignore[arg-type]
    for _ in range(2):
        reply = me.ask("POST", shared.url(path), body)  # type: ignore[arg-type]
        assert (reply.status, reply.error) == (428, "no-attempt")
        assert "Twiceshy-Step" in reply.json()["detail"]
    assert me.ask("POST", shared.url(path), body, {"Twiceshy-Step": "again"}).status // 100 == 2  # type: ignore[arg-type]
    assert len(shared.received()) == 2


def test_a_task_that_begins_anew_makes_no_other_effect(shared: Stack, run: str) -> None:
    me = Attempt(run, None, shared.sidecar.port)
    assert me.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    assert me.ask("POST", shared.url("/orders"), order(1)).status == 201
    assert me.ask("POST", shared.url("/email/send"), MAIL).status == 202
    # The task is run again in this process: its model answers otherwise.
    assert me.ask("GET", shared.url("/pantry")).status == 200
    assert me.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    for path, body in (("/orders", order(2)), ("/orders", order(1)), ("/email/send", MAIL)):
        assert me.ask("POST", shared.url(path), body).error == "no-attempt"
    assert me.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    assert [each.service for each in shared.effects() if each.service != "llm"] == ["orders", "email"]


def test_nor_while_the_first_effect_is_on_its_way(shared: Stack, run: str) -> None:
    me = Attempt(run, None, shared.sidecar.port)
    assert me.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    shared.sandbox.fault(match={"path": "/orders"}, hold=run)
    given_up = me.send("POST", shared.url("/orders"), order(1))
    shared.sandbox.wait_held(run)
    given_up.close()
    assert me.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    assert me.ask("POST", shared.url("/orders"), order(2)).error == "no-attempt"
    assert me.ask("POST", shared.url("/email/send"), MAIL).error == "no-attempt"
    same = me.in_background("POST", shared.url("/orders"), order(1))  # it waits for the one that is out
    shared.sandbox.release(run)
    assert same.result().status in (201, 428)
    assert len(shared.effects("orders")) == 1


# ---- without a token: other ends of an attempt


def test_a_living_agent_ends_with_its_sidecar(shared: Stack, run: str) -> None:
    with Speaker(shared, run) as agent, Speaker(shared, run) as another:
        live = agent.ask("POST", "/orders", order())
        shared.restart()
        for method, path, body in (("POST", "/orders", order(2)), ("GET", "/pantry", None), ("PUT", RESULT, {})):
            reply = agent.ask(method, path, body)
            assert (reply.status, reply.error) == (423, "sidecar-changed")
        assert another.ask("POST", "/orders", order()).error == "fenced"
        agent.kill()
        again = another.ask("POST", "/orders", order())
        assert (again.replayed, again.body) == (True, live.body)
    assert len(shared.effects()) == 1


def test_named_steps_outlive_the_sidecar(shared: Stack, run: str) -> None:
    with Speaker(shared, run) as agent:
        live = agent.ask("POST", "/orders", order(), {"Twiceshy-Step": "one"})
        shared.restart()
        again = agent.ask("POST", "/orders", order(), {"Twiceshy-Step": "one"})
        assert (again.replayed, again.body) == (True, live.body)
        assert agent.ask("POST", "/orders", order(2), {"Twiceshy-Step": "two"}).status == 201
        # But where it stands otherwise, nobody knows.
        assert agent.ask("POST", "/orders", order(3)).error == "no-attempt"
        assert agent.ask("GET", "/pantry").status == 200
    assert len(shared.effects()) == 2


def test_a_claimed_token_fences_it_at_once(shared: Stack, run: str) -> None:
    with Speaker(shared, run) as agent:
        live = agent.ask("POST", "/orders", order())
        claimed = shared.claim(run, proved_dead=False)
        assert agent.ask("POST", "/orders", order(2)).error == "fenced"
        again = claimed.ask("POST", shared.url("/orders"), order())
        assert (again.replayed, again.body) == (True, live.body)
        assert agent.ask("GET", "/pantry").error == "fenced"
        assert agent.ask("POST", "/orders", order(2), {"Twiceshy-Step": "two"}).error == "fenced"
        assert claimed.ask("POST", shared.url("/email/send"), MAIL).status == 202
    assert [each.service for each in shared.effects()] == ["orders", "email"]


def test_its_result_ends_it(shared: Stack, run: str) -> None:
    with Speaker(shared, run) as agent:
        assert agent.ask("POST", "/orders", order()).status == 201
        assert agent.ask("PUT", RESULT, {"sum": 5}).status == 204
        assert shared.fetch("SELECT status, result FROM twiceshy.run WHERE id = $1", run) == [("done", b'{"sum": 5}')]
        reply = agent.ask("POST", "/orders", order(2))
        assert (reply.status, reply.error) == (423, "not-running")
    with Speaker(shared, run) as another:
        assert another.ask("POST", "/orders", order()).error == "not-running"
    assert len(shared.effects()) == 1


def test_a_stopped_run_says_so_to_the_next_group(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, drop="after")
    with Speaker(shared, run) as agent:
        stopped = agent.ask("POST", "/email/send", MAIL)
        assert (stopped.status, stopped.error) == (424, "ambiguous")
    with Speaker(shared, run) as another, Speaker(shared, run) as waits:
        for path, body in (("/email/send", MAIL), ("/orders", order())):
            reply = another.ask("POST", path, body)
            assert (reply.status, reply.error, reply.step) == (424, "ambiguous", stopped.step)
        shared.resolve(run, stopped.step, "assume_done")
        assert another.ask("POST", "/email/send", MAIL).replayed
        assert waits.ask("POST", "/email/send", MAIL).error == "fenced"
    assert len(shared.effects()) == 1


def test_after_a_reboot_numbers_of_processes_say_nothing(shared: Stack, run: str) -> None:
    """A container starts again, and its agent has the number that it had before."""
    with Speaker(shared, run) as agent:
        live = agent.ask("POST", "/orders", order())
        here = peers.read(agent.pid)
        assert here is not None
        before = f"{here.group}:{here.pid}:{here.started}:another-boot/1"
        shared.fetch("UPDATE twiceshy.attempt SET process = $2 WHERE run_id = $1", run, before)
        shared.restart()
        again = agent.ask("POST", "/orders", order())
        assert (again.replayed, again.body) == (True, live.body)


# ---- attempts that nobody ends


@pytest.fixture(scope="module")
def brisk_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(module_dsn, tmp_path_factory.mktemp("brisk"), lease=6, idle_timeout=1) as made:
        yield made


@pytest.fixture
def brisk(brisk_stack: Stack) -> Stack:
    """A stack that looks every two seconds, and calls an attempt idle after one."""
    brisk_stack.mark()
    return brisk_stack


def test_an_idle_attempt_has_failed_and_its_process_begins_nothing(brisk: Stack, run: str) -> None:
    with Speaker(brisk, run) as agent, Speaker(brisk, run) as another:
        live = agent.ask("POST", "/orders", order())
        brisk.sandbox.wait_for(lambda: status(brisk, run) == ("queued", "failed"))
        # It lives on: does it go on, or begin anew?
        for method, path, body in (("POST", "/orders", order()), ("POST", "/orders", order(2)), ("PUT", RESULT, {})):
            reply = agent.ask(method, path, body)
            assert (reply.status, reply.error) == (428, "no-attempt")
            assert "Twiceshy-Step" in reply.json()["detail"]
        again = another.ask("POST", "/orders", order())
        assert (again.replayed, again.body) == (True, live.body)
        assert agent.ask("POST", "/orders", order(2)).error == "fenced"
        another.kill()
        assert agent.ask("POST", "/orders", order(2)).error == "no-attempt"
        assert agent.ask("POST", "/orders", order(2), {"Twiceshy-Step": "two"}).status == 201
        assert agent.ask("POST", "/orders", order(3)).error == "no-attempt"
        assert status(brisk, run)[0] == "running"
    assert len(brisk.effects()) == 2


def test_an_attempt_that_waits_for_an_answer_is_not_idle(brisk: Stack, run: str) -> None:
    brisk.sandbox.fault(match={"path": "/email/send"}, hold=run)
    with Speaker(brisk, run) as agent, Speaker(brisk, run + "-2") as other:
        agent.begin("POST", "/email/send", MAIL)
        brisk.sandbox.wait_held(run)
        assert other.ask("GET", "/pantry").status == 200
        brisk.sandbox.wait_for(lambda: status(brisk, run + "-2") == ("queued", "failed"))
        brisk.sandbox.release(run)
        assert agent.answer().status == 202
        assert agent.ask("PUT", RESULT, {}).status == 204
    assert status(brisk, run) == ("done", "done")


def test_a_result_waits_for_what_is_on_its_way(brisk: Stack, run: str) -> None:
    brisk.sandbox.fault(match={"path": "/email/send"}, hold=run)
    with Script() as worker:
        first, second = worker.speaker(brisk, run), worker.speaker(brisk, run)
        first.begin("POST", "/email/send", MAIL)
        brisk.sandbox.wait_held(run)
        assert second.ask("PUT", RESULT, {"sum": 1}).status == 204
        assert status(brisk, run)[0] == "running"
        brisk.sandbox.release(run)
        assert first.answer().status == 202
        brisk.sandbox.wait_for(lambda: status(brisk, run) == ("done", "done"))
