"""Who may act for a run: the current attempt, through the sidecar it began with, and nobody else (DESIGN §2, §3.2)."""

import http.client
import json
import socket
from collections.abc import Callable

import pytest

from tests.raw import locked
from tests.stack import Attempt, Reply, Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}


def everything(stack: Stack, attempt: Attempt, done: str = "/orders") -> list[Reply]:
    """One of each kind of request: a replay, a read, an effect, a model, passthrough, the sidecar's own."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    return [
        attempt.ask("POST", stack.url(done), ORDER),
        attempt.ask("GET", stack.url("/pantry")),
        attempt.ask("HEAD", stack.url("/pantry")),
        attempt.ask("POST", stack.url("/email/send"), MAIL),
        attempt.ask("POST", stack.url("/v1/chat/completions"), CHAT),
        attempt.ask("POST", stack.url("/email/send"), MAIL, {"Twiceshy-Step": "named"}),
        attempt.ask("POST", stack.url("/any/token"), "grant_type=client_credentials", form),
        attempt.ask("PUT", "http://twiceshy.internal/result", "1"),
        attempt.ask("GET", "http://twiceshy.internal/run"),
    ]


def all_refused(replies: list[Reply], code: str) -> bool:
    return all((reply.status, reply.error) == (423, code) for reply in replies)


def test_a_fenced_token_gets_423_for_everything_and_nothing_goes_upstream(shared: Stack, run: str) -> None:
    first = shared.claim(run)
    assert first.ask("POST", shared.url("/orders"), ORDER).status == 201
    assert first.ask("GET", shared.url("/pantry")).status == 200
    second = shared.claim(run)
    before = len(shared.received())
    # Before the new attempt has said a word, the journal itself knows.
    assert all_refused([first.ask("POST", shared.url("/email/send"), MAIL)], "fenced")
    assert second.ask("POST", shared.url("/orders"), ORDER).replayed
    assert all_refused(everything(shared, first), "fenced")
    assert len(shared.received()) == before
    assert shared.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] is None
    # The fenced one did no harm to the other.
    assert second.ask("POST", shared.url("/email/send"), MAIL).status == 202


def test_a_zombie_does_not_take_its_successor_down(shared: Stack, run: str) -> None:
    """Its intent was under way when the new attempt came, and is fenced when that already speaks."""
    first = shared.claim(run)
    assert first.ask("GET", shared.url("/pantry")).status == 200
    second = shared.claim(run)
    with locked(shared.dsn, run):
        zombie = first.in_background("POST", shared.url("/email/send"), MAIL)
        shared.sandbox.wait_for(lambda: waiting(shared, "twiceshy.write"))
        mine = second.in_background("POST", shared.url("/orders"), ORDER)
        # The writer sets a locked run aside for a moment. Now the new attempt is the first to get the lock.
        shared.sandbox.wait_for(lambda: waiting(shared, "SET sidecar") and not waiting(shared, "twiceshy.write"))
    assert mine.result().status == 201
    zombie.thread.join(30)
    assert zombie.reply is None or zombie.reply.status == 423
    assert shared.effects("email") == []
    assert second.ask("POST", shared.url("/email/send"), MAIL).status == 202


def waiting(stack: Stack, words: str) -> int:
    """How many sessions of the database wait for a lock in a statement with these *words*."""
    statement = """
        SELECT FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database() AND query LIKE '%' || $1 || '%'
    """
    return len(stack.fetch(statement, words))


@pytest.mark.parametrize("stream", [False, True], ids=["waiting", "streaming"])
def test_a_zombie_that_waits_for_an_answer_is_cut(shared: Stack, run: str, stream: bool) -> None:
    held = {"hold_events": {"2": "slow"}} if stream else {"hold": "slow"}
    shared.sandbox.fault(match={"path": "/v1/*"}, **held)
    first = shared.claim(run)
    waiting = first.in_background("POST", shared.url("/v1/chat/completions"), {**CHAT, "stream": stream})
    shared.sandbox.wait_held("slow")
    second = shared.claim(run)
    assert second.ask("GET", shared.url("/pantry")).status == 200
    if stream:
        assert waiting.result().cut
    else:
        with pytest.raises((OSError, http.client.HTTPException)):
            waiting.result()
    joined = second.in_background("POST", shared.url("/v1/chat/completions"), {**CHAT, "stream": stream})
    shared.sandbox.wait_for(lambda: [part for _, part in second.steps()][1:] == ["joined"])
    shared.sandbox.release("slow")
    assert joined.result().status == 200
    assert len(shared.received("llm")) == 1


def test_a_read_of_a_zombie_is_not_recorded(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/any/read"}, nth=1, hold="slow")
    first = shared.claim(run)
    first.send("GET", shared.url("/any/read"))
    shared.sandbox.wait_held("slow")
    second = shared.claim(run)
    mine = second.ask("GET", shared.url("/any/read"))
    shared.sandbox.release("slow")
    shared.end(second, "died")
    assert shared.claim(run).ask("GET", shared.url("/any/read")).body == mine.body
    assert len(shared.received("any")) == 2


def test_an_attempt_ends_with_its_sidecar(shared: Stack, run: str) -> None:
    first = shared.claim(run)
    assert first.ask("POST", shared.url("/orders"), ORDER).status == 201
    before = len(shared.received())
    shared.restart()
    assert all_refused(everything(shared, first), "sidecar-changed")
    assert len(shared.received()) == before
    second = shared.claim(run)
    assert second.ask("POST", shared.url("/orders"), ORDER).replayed
    assert all_refused(everything(shared, first), "fenced")


def never(stack: Stack, attempt: Attempt) -> None:
    """A made-up password, fixed in somebody's environment file."""
    attempt.token = "fixed-made-up-password"


def not_there(stack: Stack, attempt: Attempt) -> None:
    attempt.run = "nobody-made-this-run"


def of_another(stack: Stack, attempt: Attempt) -> None:
    attempt.token = stack.claim(attempt.run + "-other").token


def without(stack: Stack, attempt: Attempt) -> None:
    """A run that was ever claimed with a token takes its token and nothing else."""
    attempt.token = None


def over(stack: Stack, attempt: Attempt) -> None:
    stack.end(attempt, "done", 0)


@pytest.mark.parametrize("spoil", [never, not_there, of_another, without, over])
@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_any_other_token_is_refused(
    shared: Stack, run: str, spoil: Callable[[Stack, Attempt], None], known: bool
) -> None:
    attempt = shared.claim(run)
    if known:
        attempt.ask("POST", shared.url("/orders"), ORDER)
    before = len(shared.received())
    spoil(shared, attempt)
    assert all_refused(everything(shared, attempt), "fenced")
    assert len(shared.received()) == before


# ---- what a refusal looks like


def fenced(stack: Stack, attempt: Attempt) -> Reply:
    attempt.token = "made-up"
    return attempt.ask("POST", stack.url("/orders"), ORDER)


def ambiguous(stack: Stack, attempt: Attempt) -> Reply:
    stack.sandbox.fault(match={"path": "/any/lost"}, drop="after")
    return attempt.ask("POST", stack.url("/any/lost"), ORDER)


def diverged(stack: Stack, attempt: Attempt) -> Reply:
    attempt.ask("POST", stack.url("/any/a"), ORDER, {"Twiceshy-Step": "one"})
    return attempt.ask("POST", stack.url("/any/b"), ORDER, {"Twiceshy-Step": "one"})


def no_run(stack: Stack, attempt: Attempt) -> Reply:
    with socket.create_connection(("127.0.0.1", attempt.port), timeout=30) as raw:
        raw.sendall(f"POST {stack.url('/orders')} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, answer.reason, named, answer.read())


def denied(stack: Stack, attempt: Attempt) -> Reply:
    return attempt.ask("GET", "http://169.254.169.254/latest/meta-data/")


def malformed(stack: Stack, attempt: Attempt) -> Reply:
    return attempt.ask("GET", stack.url("/pantry"), None, {"Twiceshy-Step": "white space"})


def too_large(stack: Stack, attempt: Attempt) -> Reply:
    connection = attempt.connect()
    connection.putrequest("POST", stack.url("/orders"))
    for name, value in attempt.headers({"Content-Length": str(65 << 20), "Expect": "100-continue"}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    named = {name.lower(): value for name, value in answer.getheaders()}
    return Reply(answer.status, answer.reason, named, answer.read())


@pytest.mark.parametrize(
    ("provoke", "status", "code"),
    [
        (fenced, 423, "fenced"), (ambiguous, 424, "ambiguous"), (diverged, 412, "diverged"), (no_run, 428, "no-run"),
        (denied, 403, "denied"), (malformed, 400, "bad-identity"), (too_large, 413, "body-too-large"),
    ],
)  # fmt: skip
def test_a_refusal_stops_every_client_and_says_why(
    shared: Stack, run: str, provoke: Callable[[Stack, Attempt], Reply], status: int, code: str
) -> None:
    refused = provoke(shared, shared.claim(run))
    assert (refused.status, refused.error) == (status, code)
    assert "twiceshy" in refused.reason.lower()
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["x-should-retry"] == refused.headers["stripe-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    said = json.loads(refused.body)
    assert said["error"]["type"] == "twiceshy_" + code.replace("-", "_")
    assert said["error"]["message"] == said["message"] == said["detail"]
    assert (said["status"], said["title"]) == (status, refused.reason)
    assert len(said["message"]) > 20
