"""What doctor found, in words and as data: what counts against a program and what does not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.launch.causes import Evidence, Frame, Process
from runtime.launch.diagnosis import Connection, Diagnosis, Outcome, Probe, as_json, lines, live, probe
from runtime.launch.sightings import Address, Kind, Transport

MET = json.dumps({"run": "r1", "attempt": 1, "sidecar": "s1"})
REFUSED = json.dumps({"message": "names no run", "error": {"type": "twiceshy_no_run"}})
PYTHON = Process(7, "/usr/bin/python3.12", ("python", "agent.py"), {})


@pytest.mark.parametrize(
    ("answer", "error", "expected"),
    [
        (MET, None, Outcome.REACHED),
        (MET.replace("s1", "s2"), None, Outcome.PAST),  # another sidecar
        (MET.replace("r1", "r2"), None, Outcome.PAST),
        (REFUSED, None, Outcome.REFUSED),
        ("<html>", None, Outcome.PAST),  # a provider that answers for names that there are not
        ("7", None, Outcome.PAST),
        (None, "URLError: <urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer certificate>",
         Outcome.DISTRUSTS),
        (None, "TypeError: fetch failed < SELF_SIGNED_CERT_IN_CHAIN: self-signed certificate in certificate chain",
         Outcome.DISTRUSTS),
        (None, "curl: (60) SSL certificate problem: unable to get local issuer certificate", Outcome.DISTRUSTS),
        (None, "gaierror: [Errno -2] Name or service not known", Outcome.PAST),
        (None, "gaierror: [Errno -3] Temporary failure in name resolution", Outcome.PAST),
        (None, "ENOTFOUND: getaddrinfo ENOTFOUND probe.doctor.twiceshy.internal", Outcome.PAST),
        (None, "curl: (6) Could not resolve host: x", Outcome.PAST),
        (None, "no answer within 10 s", Outcome.FAILED),
        (None, None, Outcome.FAILED),
    ],
)  # fmt: skip
def test_what_a_probe_means(answer: str | None, error: str | None, expected: Outcome) -> None:
    told = {"client": "requests", "scheme": "https", "version": "2", "answer": answer, "error": error}
    found = probe(told, run="r1", sidecar="s1")
    assert (found.client, found.scheme, found.version, found.outcome) == ("requests", "https", "2", expected)


@given(st.dictionaries(st.sampled_from(["client", "answer", "error"]), st.none() | st.text() | st.integers()))
def test_no_probe_is_the_end_of_it(told: dict[str, Any]) -> None:
    probe(told, run="r1", sidecar="s1")


# ---- what counts


def seen(
    kind: Kind = Kind.PAST, host: str = "192.0.2.7", port: int = 443, *frames: str, process: Process = PYTHON,
    transport: Transport = Transport.TCP, count: int = 1, outcome: str = "", name: str = "",
) -> Connection:  # fmt: skip
    evidence = Evidence(process, Address(host, port), {}, tuple(Frame(each, 3) for each in frames))
    return Connection(kind, transport, evidence, count, outcome, name)


def diagnosis(*connections: Connection, **more: Any) -> Diagnosis:
    return Diagnosis("r1", "python agent.py", "exit code 0", "strace", connections=connections, **more)


def text(found: Diagnosis) -> str:
    return "\n".join(lines(found))


REACHED = Probe("urllib", "https", Outcome.REACHED)


@pytest.mark.parametrize(
    "found",
    [
        diagnosis(),
        diagnosis(probes=[REACHED, Probe("urllib3.PoolManager", "https", Outcome.PAST)]),
        diagnosis(probes=[REACHED, Probe("aiohttp", "https", Outcome.PAST)]),  # who says that it is used?
        diagnosis(arrived={"api.example": {"journalled": 3, "refused": 1}, "grpc.example": {"tunnel": 1}}),
        diagnosis(
            seen(Kind.SERVICE, "127.0.0.1", 5432), seen(Kind.LOOKUP, "10.0.0.1", 53, transport=Transport.UDP),
            seen(Kind.DATAGRAM, "192.0.2.7", 123, transport=Transport.UDP), seen(Kind.ALLOWED, "192.0.2.7", 9999),
            seen(Kind.PAST, "127.0.0.1", 6000, "/lib/python3.12/site-packages/asyncpg/x.py", "/agent.py"),
        ),
    ],
)  # fmt: skip
def test_what_is_well(found: Diagnosis) -> None:
    assert found.well
    assert found.past == []
    assert as_json(found)["well"] is True
    assert "✘" not in text(found) or found.probes
    assert "✔" in lines(found)[-1]


@pytest.mark.parametrize(
    "found",
    [
        diagnosis(seen()),
        diagnosis(seen(Kind.QUIC, transport=Transport.UDP)),
        diagnosis(seen(outcome="refused")),
        diagnosis(seen(Kind.PAST, "192.0.2.7", 5432)),
        diagnosis(distrusts=["api.example: this client does not trust the CA"]),
        diagnosis(probes=[Probe("urllib", "https", Outcome.DISTRUSTS), Probe("urllib", "http", Outcome.PAST)]),
        diagnosis(failure="OSError()"),
    ],
)
def test_what_is_not(found: Diagnosis) -> None:
    assert not found.well
    assert "✘" in lines(found)[-1]
    json.dumps(as_json(found))


def test_who_connected_where_from_and_what_to_do() -> None:
    stack = (
        "/lib/python3.12/site-packages/urllib3/connection.py",
        "/lib/python3.12/site-packages/shop/x.py",
        "/agent.py",
    )
    said = text(diagnosis(seen(Kind.PAST, "192.0.2.7", 443, *stack, count=2, name="api.example")))
    assert "192.0.2.7:443 (api.example) · 2 connections · looks like HTTP(S) · pid 7: python agent.py" in said
    assert "/agent.py:3: shop → urllib3: urllib3.PoolManager reads no proxy variable" in said
    assert "what to do: urllib3.ProxyManager" in said


def test_one_cause_at_one_place_is_one_finding() -> None:
    stack = ("/lib/python3.12/site-packages/urllib3/connection.py", "/agent.py")
    other = Process(8, PYTHON.program, PYTHON.words, {})
    found = diagnosis(
        seen(Kind.PAST, "192.0.2.7", 443, *stack), seen(Kind.PAST, "192.0.2.7", 443, *stack, process=other),
        seen(Kind.PAST, "192.0.2.7", 443),
    )  # fmt: skip
    assert [(each.cause.name, each.pids, each.count) for each in found.past] == [
        ("urllib3.PoolManager", (7, 8), 2), ("a C library in Python", (7,), 1),
    ]  # fmt: skip
    assert "1 address reached past" in text(found)


def test_what_passed_unjournalled_is_told_apart_from_what_arrived() -> None:
    found = diagnosis(arrived={"a.example": {"journalled": 3, "WebSocket": 1}, "b.example": {"tunnel": 2}})
    assert found.requests == {"a.example": {"journalled": 3}}
    assert found.unjournalled == {"a.example": {"WebSocket": 1}, "b.example": {"tunnel": 2}}
    assert "b.example  2 tunnels" in text(found)


def test_a_command_does_not_move_the_terminals_cursor() -> None:
    odd = Process(7, "/usr/bin/x", ("x", "\x1b[2J\n" + "y" * 500), {})
    said = lines(diagnosis(seen(process=odd)))
    assert all(each.isprintable() for each in said)
    assert live(seen(process=odd)).isprintable()
    assert max(len(each) for each in said) < 300


def test_all_of_it_is_there_for_programs() -> None:
    found = diagnosis(
        seen(Kind.PAST, "192.0.2.7", 443, "/agent.py", name="api.example", outcome="refused"),
        seen(Kind.SERVICE, "127.0.0.1", 5432), probes=[REACHED], arrived={"a.example": {"journalled": 3}},
    )  # fmt: skip
    data = json.loads(json.dumps(as_json(found)))
    assert data["past"] == [
        {"address": "192.0.2.7", "port": 443, "transport": "tcp", "name": "api.example", "cause": "a raw socket",
         "words": data["past"][0]["words"], "remedy": data["past"][0]["remedy"], "at": "/agent.py:3", "through": [],
         "command": "python agent.py", "pids": [7], "connections": 1, "outcome": "refused"}
    ]  # fmt: skip
    assert data["services"][0]["speaks"] == "PostgreSQL"
    assert data["probes"][0] == {
        "client": "urllib", "version": "", "scheme": "https", "outcome": "reached", "words": "",
    }  # fmt: skip
    assert (data["run"], data["well"], data["arrived"]) == ("r1", False, {"a.example": {"journalled": 3}})
