"""What the sidecar tells ``twiceshy doctor``: who was led here, and which requests arrived."""

import json
import ssl
from collections.abc import Iterator

import pytest

from proxy.run import HOSTS, OTHERS
from tests.conftest import fresh_database
from tests.stack import Attempt, Stack, stack
from tests.tunnelled import Secure, trusting

UNREADABLE = {"X-Name": "caf\xe9"}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 1}


@pytest.fixture(scope="module")
def one_stack(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("arrivals")) as made:
            yield made


@pytest.fixture
def shared(one_stack: Stack) -> Iterator[Stack]:
    one_stack.mark()
    yield one_stack
    one_stack.sandbox.clear()


def arrived(attempt: Attempt) -> object:
    return attempt.ask("GET", "http://twiceshy.internal/attempt").json()["arrived"]


def test_a_name_that_only_the_sidecar_knows(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    met = {"run": run, "attempt": 1, "sidecar": shared.sidecar.id}
    for name in ("doctor.twiceshy.internal", "n1.doctor.twiceshy.internal"):
        assert attempt.ask("GET", f"http://{name}/").json() == met
        tls: ssl.SSLContext = trusting(shared)
        secure = Secure(run, attempt.token, attempt.port, attempt.sockets, name, 443, tls)
        assert secure.ask("GET", "/").json() == met
    for method, name in (("POST", "doctor.twiceshy.internal"), ("GET", "nodoctor.twiceshy.internal")):
        assert attempt.ask(method, f"http://{name}/run").error == "not-found"
    assert attempt.ask("PUT", "http://other.twiceshy.internal/result", "1").error == "not-found"
    assert arrived(attempt) == {}


def test_requests_are_counted_by_host_and_fate(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    host = f"127.0.0.1:{shared.sandbox.port}"
    attempt.ask("POST", shared.sandbox.url + "/orders", ORDER)
    attempt.ask("GET", shared.sandbox.url + "/pantry")
    attempt.ask("POST", shared.sandbox.url + "/any/token", "grant_type=client_credentials",
                {"Content-Type": "application/x-www-form-urlencoded"})  # fmt: skip
    assert attempt.ask("GET", shared.sandbox.url + "/any/x", headers=UNREADABLE).error == "bad-request"
    assert arrived(attempt) == {host: {"journalled": 2, "passthrough": 1, "refused": 1}}


def test_what_stops_the_run_is_refused_and_so_is_all_after_it(shared: Stack, run: str) -> None:
    attempt, step = shared.claim(run), {"Twiceshy-Step": "one"}
    assert attempt.ask("POST", shared.sandbox.url + "/any/a", "a", step).status == 200
    assert attempt.ask("POST", shared.sandbox.url + "/any/b", "b", step).error == "diverged"
    assert attempt.ask("GET", shared.sandbox.url + "/any/c").error == "diverged"
    [row] = shared.fetch("SELECT tape FROM twiceshy.attempt WHERE run_id = $1", run)
    host = f"127.0.0.1:{shared.sandbox.port}"
    assert json.loads(row["tape"])["arrived"] == {host: {"journalled": 1, "refused": 2}}


def test_the_hosts_that_are_counted_apart_are_so_many(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    attempt.ask("GET", "http://twiceshy.internal/run")
    for n in range(HOSTS + 2):
        attempt.ask("GET", f"http://h{n}.example/", headers=UNREADABLE)
    counted = arrived(attempt)
    assert isinstance(counted, dict)
    assert len(counted) == HOSTS + 1
    assert counted[OTHERS] == {"refused": 2}
