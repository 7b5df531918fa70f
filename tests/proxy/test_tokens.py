"""Who may speak for a run: the forms of naming it, and its tokens (DESIGN §2)."""

import pytest

from tests.proxy.speakers import (
    CHAT,
    INTERNAL,
    MAIL,
    RESULT,
    Bare,
    Form,
    Speaker,
    ask,
    by_header,
    credentials,
    forms,
    gateway,
    order,
    status,
)
from tests.stack import Stack


@forms
@pytest.mark.parametrize("tokened", [True, False], ids=["token", "none"])
def test_each_form_names_the_run_and_nothing_of_it_goes_upstream(
    shared: Stack, run: str, form: Form, tokened: bool
) -> None:
    token = shared.claim(run).token if tokened else None
    for method, path, body in (("GET", "/pantry", None), ("POST", "/orders", order()), ("POST", "/email/send", MAIL)):
        assert ask(shared, form, run, token, method, path, body).status // 100 == 2
    assert len(shared.received()) == 3
    for each in shared.received():
        assert {name.lower() for name, _ in each.headers} <= {
            "host", "accept-encoding", "content-type", "content-length", "idempotency-key", "via",
            "connection",
        }  # fmt: skip
        seen = repr((each.target, each.headers))
        assert run not in seen
        assert token is None or token not in seen


@forms
def test_the_forms_are_of_one_attempt(shared: Stack, run: str, form: Form) -> None:
    token = shared.claim(run).token
    live = ask(shared, form, run, token, "POST", "/orders", order())
    token = shared.claim(run).token
    for other in (credentials, by_header, gateway):
        assert ask(shared, other, run, token, "GET", INTERNAL).json()["attempt"] == 2
    again = ask(shared, by_header, run, token, "POST", "/orders", order())
    assert (again.replayed, again.body) == (True, live.body)


def test_a_run_named_twice_alike_is_named(shared: Stack, run: str) -> None:
    token = shared.claim(run).token
    for given, also in (
        (token, {"Twiceshy-Run": run, "Twiceshy-Token": str(token)}),
        (None, {"Twiceshy-Token": str(token)}),
    ):
        assert ask(shared, credentials, run, given, "GET", "/pantry", also=also).status == 200


@pytest.mark.parametrize("form", [credentials, gateway])
def test_a_run_named_twice_differently_is_refused(shared: Stack, run: str, form: Form) -> None:
    token = shared.claim(run).token
    for also in ({"Twiceshy-Run": "another"}, {"Twiceshy-Run": run, "Twiceshy-Token": "another"}):
        reply = ask(shared, form, run, token, "POST", "/orders", order(), also)
        assert (reply.status, reply.error) == (400, "bad-identity")
    target, headers = gateway("another", token, shared.url("/orders"))
    _, others = credentials(run, token, "")
    reply = Bare(run, token, shared.sidecar.port).ask("POST", target, order(), headers | others)
    assert (reply.status, reply.error) == (400, "bad-identity")
    assert shared.received() == []


# ---- tokens


@forms
@pytest.mark.parametrize("made_up", ["secret", "0" * 43, "None"])
def test_a_made_up_token_is_refused_and_disturbs_nobody(shared: Stack, run: str, form: Form, made_up: str) -> None:
    def refused() -> None:
        for method, path, body in (("POST", "/any/x", MAIL), ("GET", "/pantry", None), ("PUT", RESULT, {})):
            reply = ask(shared, form, run, made_up, method, path, body)
            assert (reply.status, reply.error) == (423, "fenced")
            assert "token" in reply.json()["detail"]

    refused()
    assert shared.fetch("SELECT FROM twiceshy.run WHERE id = $1", run) == []  # it makes no run either
    agent = shared.claim(run)
    refused()  # before the agent has spoken
    assert agent.ask("POST", shared.url("/orders"), order()).status == 201
    shared.sandbox.fault(match={"path": "/email/send"}, hold=run)
    mailing = agent.in_background("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.wait_held(run)
    refused()
    shared.sandbox.release(run)
    assert mailing.result().status == 202
    assert agent.ask("POST", shared.url("/orders"), order(2)).status == 201
    assert len(agent.steps()) == 3
    shared.end(agent, "died")
    refused()
    assert len(shared.received()) == 3


def test_a_run_that_was_ever_leased_takes_its_current_token_and_nothing_else(shared: Stack, run: str) -> None:
    first = shared.claim(run)
    assert first.ask("GET", shared.url("/pantry")).status == 200
    second = shared.claim(run)

    def refused(token: str | None) -> None:
        for method, path, body in (("POST", "/orders", order()), ("POST", "/v1/chat/completions", CHAT)):
            reply = ask(shared, credentials, run, token, method, path, body)
            assert (reply.status, reply.error) == (423, "fenced")

    refused(first.token)  # in the sidecar's memory it is the current one still
    assert second.ask("GET", shared.url("/pantry")).status == 200
    refused(first.token)
    refused(None)
    shared.end(second, "interrupted")
    for token in (first.token, second.token, None):
        refused(token)
    assert "takes its current token only" in ask(shared, by_header, run, None, "GET", "/pantry").json()["detail"]
    with Speaker(shared, run) as another:
        assert another.ask("GET", "/pantry").error == "fenced"
    assert {each.method for each in shared.received()} == {"GET"}
    assert shared.claim(run).ask("POST", shared.url("/orders"), order()).status == 201


# ---- the end of attempts with a token


def test_a_result_ends_what_no_launcher_watches(shared: Stack, run: str) -> None:
    watched = shared.claim(run)
    assert watched.ask("PUT", RESULT, {"n": 1}).status == 204
    assert status(shared, run) == ("running", None)  # its exit code decides
    assert watched.ask("PUT", RESULT, {"n": 2}).status == 204
    assert watched.ask("POST", shared.url("/orders"), order()).status == 201
    shared.end(watched, "interrupted")

    alone = shared.claim(run, kind="claim")
    assert alone.ask("POST", shared.url("/orders"), order()).replayed
    assert alone.ask("PUT", RESULT, "no JSON").error == "bad-request"
    assert alone.ask("PUT", RESULT, {"n": 3}).status == 204
    assert status(shared, run) == ("done", "done")
    assert shared.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run) == [(b'{"n": 3}',)]
    assert alone.ask("POST", shared.url("/orders"), order(2)).error == "not-running"
    assert len(shared.effects()) == 1


def test_a_result_that_is_too_large_is_refused(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    reply = attempt.ask("PUT", "http://twiceshy.internal/result", b'"' + b"x" * (4 << 20) + b'"')
    assert (reply.status, reply.error) == (413, "body-too-large")
    assert "result_max (4194304)" in reply.json()["message"]
    assert attempt.ask("PUT", "http://twiceshy.internal/result", b'"elsewhere"').status == 204


@pytest.mark.parametrize(
    "body", ["NaN", "[" * 3000 + "]" * 3000, "[" * 100000, "", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_result_that_is_no_json_is_refused(shared: Stack, run: str, body: str | bytes) -> None:
    attempt = shared.claim(run)
    reply = attempt.ask("PUT", "http://twiceshy.internal/result", body)
    assert (reply.status, reply.error) == (400, "bad-request")
    assert shared.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] is None
