"""The environment of an agent: nothing inherited leads past the sidecar."""

import shlex
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runtime.launch.environment import Kit, environment, exports, proxy_url

KIT = Kit(Path("/state/site"), Path("/state/site/preload.cjs"), Path("/state/ca.pem"), Path("/state/bundle.pem"))
INHERITED = {
    "PATH": "/bin",
    "NO_PROXY": "localhost,127.0.0.1",
    "no_proxy": "*",
    "http_proxy": "http://elsewhere:3128",
    "HTTPS_PROXY": "http://elsewhere:3128",
    "ALL_PROXY": "socks5://elsewhere",
    "all_proxy": "socks5://elsewhere",
    "PYTHONPATH": "/mine",
    "NODE_OPTIONS": "--max-old-space-size=100",
    "SSL_CERT_DIR": "/etc/ssl/certs",
    "REQUESTS_CA_BUNDLE": "/elsewhere.pem",
    "TWICESHY_TOKEN": "of-another-run",
}


def test_what_was_inherited_is_overwritten() -> None:
    given = environment(INHERITED, run="r1", token="t0", proxy="127.0.0.1:7777", kit=KIT)
    url = "http://r1:t0@127.0.0.1:7777"
    assert given == {
        "PATH": "/bin",
        "HTTP_PROXY": url, "HTTPS_PROXY": url, "http_proxy": url, "https_proxy": url,
        "NO_PROXY": "", "no_proxy": "",
        "TWICESHY_RUN": "r1", "TWICESHY_TOKEN": "t0",
        "PYTHONPATH": "/state/site:/mine",
        "SSL_CERT_FILE": "/state/bundle.pem", "REQUESTS_CA_BUNDLE": "/state/bundle.pem",
        "CURL_CA_BUNDLE": "/state/bundle.pem", "AWS_CA_BUNDLE": "/state/bundle.pem",
        "GIT_SSL_CAINFO": "/state/bundle.pem", "PIP_CERT": "/state/bundle.pem",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": "/state/bundle.pem",
        "TWICESHY_CA_FILE": "/state/ca.pem", "NODE_EXTRA_CA_CERTS": "/state/ca.pem", "NODE_USE_ENV_PROXY": "1",
        "NODE_OPTIONS": '--require "/state/site/preload.cjs" --max-old-space-size=100',
    }  # fmt: skip
    assert INHERITED["ALL_PROXY"], "what is given is not changed"


def test_an_agent_may_start_another_one() -> None:
    once = environment(INHERITED, run="r1", token="t0", proxy="127.0.0.1:7777", kit=KIT)
    assert environment(once, run="r1", token="t0", proxy="127.0.0.1:7777", kit=KIT) == once
    assert environment({"PYTHONPATH": ""}, run="r", token="t", proxy="p:1", kit=KIT)["PYTHONPATH"] == "/state/site"


def test_without_a_kit_the_python_path_is_left_alone() -> None:
    assert environment(INHERITED, run="r", token="t", proxy="p:1")["PYTHONPATH"] == "/mine"
    assert "PYTHONPATH" not in environment({}, run="r", token="t", proxy="p:1")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=30))
def test_a_shell_takes_every_value_as_it_is(value: str) -> None:
    line = next(line for line in exports({"NAME": value}) if line.startswith("export"))
    assert shlex.split(line) == ["export", f"NAME={value}"]


def test_a_shell_that_evaluates_it_is_under_the_run() -> None:
    lines = exports(environment({}, run="r1", token="none", proxy="127.0.0.1:1"))
    script = "\n".join([*lines, 'echo "$http_proxy $NO_PROXY ${ALL_PROXY-unset} $TWICESHY_RUN"'])
    said = subprocess.run(["sh", "-c", script], env={"ALL_PROXY": "x", "PATH": "/bin:/usr/bin"}, capture_output=True)
    assert said.stdout.decode() == f"{proxy_url('r1', 'none', '127.0.0.1:1')}  unset r1\n"
