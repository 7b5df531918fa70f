"""Which run a request names, what it asks for, and that nothing meant for the sidecar goes further (DESIGN §2)."""

import base64
import string
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.identity import Addressed, Named, Target, Tunnel, address, authority, connect, end_to_end
from proxy.message import Headers
from proxy.refusals import Refusal

NAME = st.text(string.ascii_letters + string.digits + "._~-", min_size=1, max_size=200)
TOKEN = NAME.filter(lambda text: text != "none")
URL = "http://api.test/v1/x?y=1"


def basic(pair: str, scheme: str = "Basic") -> tuple[bytes, bytes]:
    return b"Proxy-Authorization", f"{scheme} {base64.b64encode(pair.encode()).decode()}".encode()


def named(raw: str, *headers: tuple[bytes, bytes], tunnel: Tunnel | None = None) -> Named | None:
    read = address(raw, headers, tunnel)
    assert isinstance(read, Addressed), read
    return read.named


def refused(raw: str, *headers: tuple[bytes, bytes], tunnel: Tunnel | None = None) -> str:
    read = address(raw, headers, tunnel)
    assert isinstance(read, Refusal), read
    assert 400 <= read.status < 500
    assert "Nothing was sent" in read.message
    return read.code


def target(raw: str, *headers: tuple[bytes, bytes], tunnel: Tunnel | None = None) -> Target:
    read = address(raw, headers, tunnel)
    assert isinstance(read, Addressed), read
    return read.target


# ---- the three forms


@given(NAME, TOKEN)
@example("r" * 200, "t" * 200)
@example("~", ".")
@example("none", "None")
def test_each_form_names_run_and_token(run: str, token: str) -> None:
    expected = Named(run, token, None)
    assert named(URL, basic(f"{run}:{token}")) == expected
    assert named(f"/@{run}:{token}/https/api.test/v1/x") == expected
    assert named(URL, (b"Twiceshy-Run", run.encode()), (b"twiceshy-token", token.encode())) == expected


@given(NAME)
def test_a_run_may_be_named_without_a_token(run: str) -> None:
    """Header only, or the reserved password ``none``."""
    expected = Named(run, None, None)
    assert named(URL, (b"Twiceshy-Run", run.encode())) == expected
    assert named(URL, basic(f"{run}:none")) == expected
    assert named(f"/@{run}:none/http/api.test/") == expected
    assert named(URL, (b"Twiceshy-Run", run.encode()), (b"Twiceshy-Token", b"none")) == expected


def test_a_request_may_name_nobody() -> None:
    assert named(URL) is None
    assert named(URL, (b"Authorization", b"Basic cjp0")) is None  # meant for the upstream


@given(NAME, TOKEN, st.text(string.ascii_letters + string.digits + "._~:/@+=,-", min_size=1, max_size=200))
def test_a_step_is_named_by_header_in_every_form(run: str, token: str, step: str) -> None:
    header = (b"Twiceshy-Step", step.encode())
    expected = Named(run, token, step)
    assert named(URL, basic(f"{run}:{token}"), header) == expected
    assert named(f"/@{run}:{token}/https/api.test/v1/x", header) == expected


@given(NAME, TOKEN)
def test_forms_may_agree(run: str, token: str) -> None:
    both = (basic(f"{run}:{token}"), (b"Twiceshy-Run", run.encode()), (b"Twiceshy-Token", token.encode()))
    assert named(f"/@{run}:{token}/https/api.test/", *both) == Named(run, token, None)
    assert named(URL, basic(f"{run}:none"), both[1], both[2]) == Named(run, token, None)


# ---- percent-decoding, once


@pytest.mark.parametrize(
    ("sent", "read"),
    [("r%2d1", "r-1"), ("%72%75%6e", "run"), ("r%7E", "r~"), ("%41%2E", "A.")],
)
def test_percent_encoding_is_undone(sent: str, read: str) -> None:
    """Axios and global-agent send it as it is."""
    assert named(URL, basic(f"{sent}:{sent}")) == Named(read, read, None)
    assert named(f"/@{sent}:{sent}/https/api.test/") == Named(read, read, None)


@pytest.mark.parametrize("text", ["%2541", "r%3At", "%2F", "a%00", "%ff", "%e2%82%ac", "%", "a%2", "%25"])
def test_percent_encoding_is_undone_once_and_checked(text: str) -> None:
    assert refused(URL, basic(f"{text}:t")) == "bad-identity"
    assert refused(URL, basic(f"r:{text}")) == "bad-identity"
    assert refused(f"/@{text}:t/https/api.test/") == "bad-identity"
    assert refused(URL, (b"Twiceshy-Run", text.encode())) == "bad-identity"


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_what_is_read_is_always_well_formed(run: str, token: str) -> None:
    for raw, headers in (
        (URL, (basic(f"{run}:{token}"),)),
        (f"/@{run}:{token}/https/api.test/", ()),
        (URL, ((b"Twiceshy-Run", run.encode("utf-8", "replace")), (b"Twiceshy-Token", token.encode()))),
    ):
        read = address(raw, headers)
        if isinstance(read, Addressed) and read.named is not None:
            texts = [read.named.run] + ([read.named.token] if read.named.token is not None else [])
            assert all(0 < len(text) <= 200 and set(text) <= set(NAME_CHARACTERS) for text in texts)


NAME_CHARACTERS = string.ascii_letters + string.digits + "._~-"


# ---- refusals


@pytest.mark.parametrize(
    "headers",
    [
        (basic("r"),),  # no colon
        (basic("r:"),),  # a client without a password sends nothing at all; one with an empty one says nothing
        (basic(":t"),),
        (basic(""),),
        (basic("r:t:u"),),
        (basic("r t:u"),),
        (basic("ä:t"),),
        (basic(f"{'r' * 201}:t"),),
        (basic("r:t", "Bearer"),),
        (basic("r:t", "Digest"),),
        ((b"Proxy-Authorization", b"Basic !!!"),),
        ((b"Proxy-Authorization", b"Basic"),),
        ((b"Proxy-Authorization", b""),),
        ((b"Proxy-Authorization", b"Basic \xff\xfe"),),
        ((b"Proxy-Authorization", b"Basic " + base64.b64encode(b"\xff\xfe:t")),),
        ((b"Twiceshy-Run", b""),),
        ((b"Twiceshy-Run", b"r s"),),
        ((b"Twiceshy-Run", b"r\xe4"),),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Token", b"")),
        ((b"Twiceshy-Token", b"t"),),  # of no run
        ((b"Twiceshy-Step", b"s"),),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Run", b"r")),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Step", b"a"), (b"twiceshy-step", b"b")),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Step", b"")),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Step", b"a#1")),  # as keys of our own look
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Step", b"a b")),
        ((b"Twiceshy-Run", b"r"), (b"Twiceshy-Step", b"s" * 201)),
        (basic("r:t"), (b"Twiceshy-Run", b"s")),  # two runs
        (basic("r:t"), (b"Twiceshy-Token", b"u")),  # two tokens
    ],
    ids=repr,
)
def test_what_names_nobody_clearly_is_refused(headers: Headers) -> None:
    assert refused(URL, *headers) == "bad-identity"


def test_two_credentials_are_refused() -> None:
    assert refused(URL, basic("r:t"), basic("r:t")) == "bad-request"


def test_the_gateway_address_and_credentials_must_agree() -> None:
    assert refused("/@r:t/https/api.test/", basic("s:t")) == "bad-identity"
    assert refused("/@r:t/https/api.test/", basic("r:u")) == "bad-identity"


@pytest.mark.parametrize(
    "raw",
    ["/@r/https/api.test/", "/@r:/https/api.test/", "/@:t/https/api.test/", "/@/https/api.test/", "/@r:t:u/http/h/"],
)
def test_a_gateway_address_without_run_and_token_is_refused(raw: str) -> None:
    assert refused(raw) == "bad-identity"


@pytest.mark.parametrize(
    "raw",
    [
        "/@r:t", "/@r:t/", "/@r:t/ftp/api.test/", "/@r:t/HTTPS/api.test/", "/@r:t/https", "/@r:t/https/",
        "/@r:t/https//x", "/@r:t/https/u@api.test/", "/@r:t/https/api.test:99999/", "/@r:t/https:/api.test/",
    ],
)  # fmt: skip
def test_a_gateway_address_that_leads_nowhere_is_refused(raw: str) -> None:
    assert refused(raw) == "bad-request"


@pytest.mark.parametrize(
    "header",
    [
        (b"Origin", b"http://evil.test"), (b"origin", b"null"), (b"Sec-Fetch-Site", b"cross-site"),
        (b"Sec-Fetch-Mode", b"navigate"), (b"Sec-Fetch-Mode", b"no-cors"), (b"Sec-Fetch-Dest", b"image"),
        (b"Sec-Fetch-User", b"?1"), (b"sec-fetch-storage-access", b"none"),
    ],
)  # fmt: skip
def test_the_gateway_address_is_not_for_web_pages(header: tuple[bytes, bytes]) -> None:
    """Refuses requests with Origin or Sec-Fetch-*."""
    assert refused("/@r:t/https/api.test/", header) == "bad-request"
    assert refused("/@r:t/https/api.test/", (b"Sec-Fetch-Mode", b"cors"), header) == "bad-request"


def test_the_gateway_address_is_for_nodes_own_fetch() -> None:
    """It sends Sec-Fetch-Mode and nothing else of the kind, which no browser does."""
    assert named("/@r:t/https/api.test/", (b"sec-fetch-mode", b"cors")) == Named("r", "t", None)


@pytest.mark.parametrize("raw", ["/v1/x", "/", "*", "/@", "@r:t/https/h/"])
def test_a_request_for_the_sidecar_itself_is_refused(raw: str) -> None:
    assert refused(raw) in ("bad-request", "bad-identity")


@pytest.mark.parametrize(
    "raw",
    [
        "ftp://api.test/", "api.test:80", "http:/api.test/", "http://", "http:///x", "http://?q", "",
        "http://u:p@api.test/", "http://u@api.test/", "http://api.test:0/", "http://api.test:65536/",
        "http://api.test:/", "http://a b/", "http://[::1/", "http://::1/", "http://./", "http://../",
        "http://a..b/", "http://.a/", "http://[fe80::1%25eth0]/",
    ],
)  # fmt: skip
def test_a_target_that_is_none_is_refused(raw: str) -> None:
    assert refused(raw) == "bad-request"


# ---- targets


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        ("http://api.test", Target("http", "api.test", 80, "/")),
        ("HTTP://API.Test/", Target("http", "api.test", 80, "/")),
        ("https://api.test/a/../b%2Fc?q=1&q=2", Target("https", "api.test", 443, "/a/../b%2Fc?q=1&q=2")),
        ("http://api.test?q", Target("http", "api.test", 80, "/?q")),
        ("http://api.test/?", Target("http", "api.test", 80, "/?")),
        ("http://api.test/x#part", Target("http", "api.test", 80, "/x")),
        ("http://api.test:8080/x", Target("http", "api.test", 8080, "/x")),
        ("http://api.test./x", Target("http", "api.test", 80, "/x")),
        ("http://[::1]:8080/x", Target("http", "::1", 8080, "/x")),
        ("http://api.test/@r:t/x", Target("http", "api.test", 80, "/@r:t/x")),
        ("http://api.test/http://other.test/", Target("http", "api.test", 80, "/http://other.test/")),
        ("http://api.test/u@v", Target("http", "api.test", 80, "/u@v")),
        ("/@r:t/https/api.test:8443/v1?x=%20", Target("https", "api.test", 8443, "/v1?x=%20")),
        ("/@r:t/http/api.test", Target("http", "api.test", 80, "/")),
        ("/@r:t/http/api.test?q", Target("http", "api.test", 80, "/?q")),
    ],
)
def test_targets_are_read_byte_for_byte(raw: str, read: Target) -> None:
    assert target(raw) == read


def test_the_sidecars_own_name_is_known() -> None:
    assert target("http://twiceshy.internal/run").internal
    assert target("https://doctor.twiceshy.internal/").internal
    assert not target("http://twiceshy.internal.test/run").internal
    assert not target("http://nottwiceshy.internal/run").internal


TUNNEL = Tunnel(Target("https", "api.test", 443, "/"), None)


def test_inside_a_tunnel_connects_authority_decides() -> None:
    assert target("/v1?x", tunnel=TUNNEL) == Target("https", "api.test", 443, "/v1?x")
    assert target("/v1", (b"Host", b"api.test"), tunnel=TUNNEL) == Target("https", "api.test", 443, "/v1")
    assert target("/v1", (b"Host", b"API.test:443"), tunnel=TUNNEL) == Target("https", "api.test", 443, "/v1")
    assert target("https://api.test/v1", tunnel=TUNNEL) == Target("https", "api.test", 443, "/v1")
    assert target("*", tunnel=TUNNEL).target == "/"


def test_inside_a_tunnel_another_host_is_refused() -> None:
    assert refused("/v1", (b"Host", b"other.test"), tunnel=TUNNEL) == "bad-request"
    assert refused("/v1", (b"Host", b"api.test:8443"), tunnel=TUNNEL) == "bad-request"
    assert refused("https://other.test/v1", tunnel=TUNNEL) == "bad-request"
    assert refused("http://api.test/v1", tunnel=TUNNEL) == "bad-request"


def test_inside_a_tunnel_a_path_is_the_upstreams_business() -> None:
    """``/@name`` is somebody's profile there, not a gateway address."""
    read = address("/@r:t/https/other.test/", (), TUNNEL)
    assert isinstance(read, Addressed)
    assert (read.named, read.gateway, read.target.target) == (None, False, "/@r:t/https/other.test/")


def connected(authority: str, *headers: tuple[bytes, bytes]) -> Tunnel:
    lines = [f"CONNECT {authority} HTTP/1.1".encode(), *(name + b": " + value for name, value in headers)]
    return connect(b"\r\n".join(lines))


def test_connect_names_the_run_of_all_that_comes_inside() -> None:
    tunnel = connected("API.test:8443", (b"Host", b"ignored"), basic("r:t"))
    assert tunnel == Tunnel(Target("https", "api.test", 8443, "/"), Named("r", "t", None))
    assert named("/v1", tunnel=tunnel) == Named("r", "t", None)
    assert named("/v1", (b"Twiceshy-Step", b"s"), tunnel=tunnel) == Named("r", "t", "s")
    assert refused("/v1", (b"Twiceshy-Run", b"other"), tunnel=tunnel) == "bad-identity"
    assert refused("/v1", basic("r:other"), tunnel=tunnel) == "bad-identity"
    assert connected("[::1]:443").target.host == "::1"
    assert connected("api.test").target.port == 443
    assert named("/v1", (b"Twiceshy-Run", b"r"), tunnel=connected("api.test:443")) == Named("r", None, None)


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"CONNECT api.test:443", "bad-request"),
        (b"CONNECT  HTTP/1.1", "bad-request"),
        (b"CONNECT api.test:0 HTTP/1.1", "bad-request"),
        (b"CONNECT u@api.test:443 HTTP/1.1", "bad-request"),
        (b"CONNECT https://api.test/ HTTP/1.1", "bad-request"),
        (b"CONNECT api.test:443 HTTP/1.1\r\nno colon", "bad-request"),
        (b"CONNECT api.test:443 HTTP/1.1\r\nProxy-Authorization: Basic !", "bad-identity"),
        (b"CONNECT api.test:443 HTTP/1.1\r\nProxy-Authorization: Bearer x", "bad-identity"),
    ],
)
def test_what_is_wrong_with_connect_is_said_inside(head: bytes, code: str) -> None:
    assert refused("/v1", tunnel=connect(head)) == code


@given(st.binary(max_size=60))
def test_any_head_of_connect_makes_a_tunnel(noise: bytes) -> None:
    assert isinstance(connect(b"CONNECT " + noise), Tunnel)


# ---- what goes further

TOKEN_OF_RUN = "tokentokentoken"
HOP_BY_HOP = [
    b"Connection", b"Keep-Alive", b"TE", b"Trailer", b"Transfer-Encoding", b"Upgrade", b"HTTP2-Settings", b"Expect",
    b"Proxy-Authorization", b"Proxy-Connection", b"Proxy-Anything", b"Twiceshy-Run", b"Twiceshy-Token",
    b"Twiceshy-Step", b"Twiceshy-Anything", b"Host", b"Content-Length",
]  # fmt: skip
PLAIN = [b"Accept", b"Content-Type", b"Authorization", b"X-Api-Key", b"Cookie", b"Idempotency-Key", b"X-Hop"]
header_name = st.sampled_from([form(name) for name in HOP_BY_HOP + PLAIN for form in (bytes, bytes.lower, bytes.upper)])
header_value = st.text(string.ascii_letters + string.digits + " ,;=/", max_size=20).map(str.encode)
some_headers = st.lists(st.tuples(header_name, header_value), max_size=12).map(tuple)


@given(some_headers)
def test_nothing_meant_for_the_sidecar_or_the_hop_goes_further(headers: Headers) -> None:
    dropped = {name.lower() for name in HOP_BY_HOP}
    for name, value in headers:
        if name.lower() == b"connection":
            dropped |= {part.strip().lower() for part in value.split(b",")}
    dropped -= {b"authorization"}
    kept = end_to_end(headers)
    assert kept == tuple(pair for pair in headers if pair[0].lower() not in dropped)


@given(
    some_headers,
    st.sampled_from(["credentials", "headers", "gateway", "all"]),
    st.sampled_from([bytes, bytes.lower, bytes.upper]),
)
def test_a_run_token_never_goes_further(headers: Headers, form: str, casing: Callable[[bytes], bytes]) -> None:
    raw = URL
    own: list[tuple[bytes, bytes]] = []
    if form in ("credentials", "all"):
        own.append(basic(f"r:{TOKEN_OF_RUN}"))
    if form in ("headers", "all"):
        own += [(b"Twiceshy-Run", b"r"), (b"Twiceshy-Token", TOKEN_OF_RUN.encode())]
    if form in ("gateway", "all"):
        raw = f"/@r:{TOKEN_OF_RUN}/https/api.test/v1/x?y=1"
    strangers = [pair for pair in headers if not pair[0].lower().startswith((b"twiceshy-", b"proxy-auth"))]
    mine = [(casing(name), value) for name, value in own]
    mixed = tuple(mine[:1] + strangers + mine[1:])
    read = address(raw, mixed)
    assert isinstance(read, Addressed)
    assert read.named == Named("r", TOKEN_OF_RUN, None)
    secret = {TOKEN_OF_RUN.encode(), base64.b64encode(f"r:{TOKEN_OF_RUN}".encode())}
    for text in [read.target.target.encode(), *(part for pair in read.headers for part in pair)]:
        assert not any(each in text for each in secret)


def test_connection_takes_no_credential_away() -> None:
    """Strip everything named in Connection, but never Host, Content-Length, Authorization."""
    headers = ((b"Connection", b"close, AUTHORIZATION, X-Hop"), (b"Authorization", b"Bearer x"), (b"x-hop", b"1"))
    assert end_to_end(headers) == ((b"Authorization", b"Bearer x"),)


# ---- authority


@given(st.text(max_size=30))
def test_an_authority_is_host_and_port_or_nothing(text: str) -> None:
    read = authority(text, 80)
    if not isinstance(read, Refusal):
        host, port = read
        assert host
        assert 0 < port < 65536
        assert not set(host) & set("/?#@[] \t\r\n")
        assert host == host.lower()
