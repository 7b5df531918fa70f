"""Why something went past the sidecar: the first cause of the table that fits what is known."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.launch.causes import CAUSES, Evidence, Frame, Process, Told, cause, library, python_flags, told
from runtime.launch.sightings import Address

URL = "http://r:t@127.0.0.1:7777"
GIVEN = {"HTTP_PROXY": URL, "HTTPS_PROXY": URL, "http_proxy": URL, "https_proxy": URL,
         "PYTHONPATH": "/kit", "NODE_OPTIONS": "/kit/preload.cjs"}  # fmt: skip
WHOLE = GIVEN | {"PYTHONPATH": "/mine:/kit", "NODE_OPTIONS": '--require "/kit/preload.cjs" --mine'}
SITE = "/venv/lib/python3.12/site-packages/"
STANDARD = "/usr/lib/python3.12/"
AGENT = Frame("/home/me/agent.py", 12)


def evidence(
    *frames: str,
    program: str = "/usr/bin/python3.12",
    words: str = "python agent.py",
    environment: Mapping[str, str] | None = WHOLE,
    loaded: str = "",
    port: int = 443,
) -> Evidence:
    """*frames*: files, the innermost first; the agent's own comes last."""
    process = Process(7, program, tuple(words.split()), environment, frozenset(loaded.split()))
    stack = (*(Frame(each, 1) for each in frames), AGENT) if frames else ()
    return Evidence(process, Address("192.0.2.7", port), GIVEN, stack)


def node(*frames: str, environment: Mapping[str, str] = WHOLE, port: int = 443) -> Evidence:
    return evidence(*frames, program="/usr/bin/node", words="node agent.js", environment=environment, port=port)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (evidence(SITE + "urllib3/util/connection.py", STANDARD + "http/client.py", SITE + "urllib3/poolmanager.py"),
         "urllib3.PoolManager"),
        (evidence(SITE + "urllib3/util/connection.py", STANDARD + "http/client.py", SITE + "requests/sessions.py"),
         "requests"),
        (evidence(SITE + "urllib3/connection.py", SITE + "botocore/httpsession.py", SITE + "boto3/x.py"), "botocore"),
        (evidence(STANDARD + "asyncio/selector_events.py", SITE + "aiohappyeyeballs/impl.py",
                  SITE + "aiohttp/connector.py"), "aiohttp"),
        (evidence(SITE + "httpcore/_sync/connection.py", SITE + "httpx/_client.py"), "httpx"),
        (evidence(SITE + "httpcore2/_sync/connection.py", SITE + "httpx2/_client.py", SITE + "openai/x.py"), "httpx"),
        (evidence(STANDARD + "socket.py", STANDARD + "http/client.py"), "http.client"),
        (evidence(STANDARD + "socket.py", STANDARD + "http/client.py", STANDARD + "urllib/request.py"),
         "urllib.request"),
        (evidence(STANDARD + "socket.py", STANDARD + "smtplib.py", port=587), "mail"),
        (evidence(SITE + "websockets/sync/client.py"), "websocket"),
        (evidence(STANDARD + "asyncio/streams.py"), "a raw socket"),
        (evidence(SITE + "asyncpg/connect_utils.py", port=6000), "driver of PostgreSQL"),
        (evidence(port=5432, words="python agent.py"), "database"),
        (evidence(environment=GIVEN | {"HTTPS_PROXY": "", "https_proxy": ""}), "environment replaced"),
        (evidence(environment={"PATH": "/bin"}), "environment replaced"),
        (evidence(words="python -I agent.py", loaded="aiohttp"), "aiohttp without sitecustomize"),
        (evidence(words="python -uES agent.py"), "python without sitecustomize"),
        (evidence(environment=WHOLE | {"PYTHONPATH": "/mine"}, loaded="aiohttp"), "aiohttp without sitecustomize"),
        (evidence(environment=None), "a C library in Python"),
        (evidence(loaded="uvloop aiohttp"), "a C library in Python"),
        (evidence(loaded="grpc"), "gRPC"),
        (node(environment=WHOLE | {"NODE_OPTIONS": "--mine"}), "Node without the preload"),
        (node("node:net", "node:internal/http2/core"), "Node's http2"),
        (node("node:net", "node:internal/deps/undici/undici"), "Node's undici"),
        (node("node:net", "node:_http_client", "/x/node_modules/own-agent/index.js"), "Node's agents"),
        (node("node:net", "/x/node_modules/ws/lib/websocket.js"), "websocket"),
        (node("node:net", "node:tls"), "a raw socket in Node"),
        (node("node:net", "/x/node_modules/@redis/client/dist/socket.js", port=6000), "driver of Redis"),
        (node(), "Node"),
        (evidence(program="/usr/bin/curl", words="curl -s http://x"), "curl"),
        (evidence(program="/usr/bin/ssh", words="ssh git@github.com", port=22), "ssh"),
        (evidence(program="/opt/agent", words="/opt/agent"), "unknown"),
        (evidence(program="", words="", environment=None), "unknown"),
    ],
)  # fmt: skip
def test_the_cause(found: Evidence, expected: str) -> None:
    assert cause(found).name == expected


def test_every_cause_has_a_remedy_and_a_name_of_its_own() -> None:
    assert all(each.words and each.remedy for each in CAUSES)
    assert len({each.name for each in CAUSES}) == len(CAUSES)


def test_the_place_in_the_program() -> None:
    found = evidence(SITE + "urllib3/connection.py", STANDARD + "http/client.py", SITE + "six.py")
    assert found.caller == AGENT
    assert found.libraries == ("urllib3", "http.client", "six")
    assert evidence().caller is None


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("agent.py -I", ""), ("-I agent.py", "-I"), ("-u -IS agent.py -E", "-u -IS"), ("-W error -I a.py", "-I"),
        ("-Werror -I a.py", "-I"), ("-uWerror a.py", "-u"), ("-X dev -I a.py", "-I"), ("-Im agent", "-I"),
        ("-m agent -I", ""), ("-c pass -I", ""), ("--check-hash-based-pycs never -E a.py", "-E"), ("-", ""), ("", ""),
        ("-I", "-I"), ("-W", ""),
    ],
)  # fmt: skip
def test_the_flags_of_a_python(words: str, flags: str) -> None:
    assert python_flags(tuple(words.split())) == flags.split()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (SITE + "aiohttp/client.py", "aiohttp"), ("/usr/lib/python3/dist-packages/requests/api.py", "requests"),
        (STANDARD + "asyncio/__init__.py", "asyncio"), ("<frozen runpy>", "frozen runpy"), ("/home/me/agent.py", ""),
        ("/x/node_modules/a/node_modules/@b/c/d.js", "@b/c"), ("node:internal/net", "net"), ("", ""),
    ],
)  # fmt: skip
def test_what_a_file_is_of(file: str, expected: str) -> None:
    assert library(file) == expected


def test_what_a_process_told() -> None:
    line = {"pid": 7, "host": "192.0.2.7", "port": 443, "name": "api.example", "frames": [["/a.py", 3]]}
    read = told(json.dumps(line))
    assert read == Told(7, "192.0.2.7", 443, "api.example", (Frame("/a.py", 3),))
    assert read.fits(7, Address("192.0.2.7", 443))
    assert not read.fits(8, Address("192.0.2.7", 443))
    assert not read.fits(7, Address("192.0.2.8", 443))
    by_name = told(json.dumps(line | {"host": "api.example", "name": None}))
    assert by_name is not None
    assert by_name.fits(7, Address("192.0.2.8", 443))
    assert by_name.to is None
    here = told(json.dumps(line | {"host": "::ffff:127.0.0.1"}))
    assert here is not None
    assert here.to == Address("127.0.0.1", 443)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), lambda each: st.dictionaries(
    st.sampled_from(["pid", "host", "port", "name", "frames"]), each)).map(json.dumps))  # fmt: skip
def test_what_cannot_be_read_is_left_out(line: str) -> None:
    told(line)
