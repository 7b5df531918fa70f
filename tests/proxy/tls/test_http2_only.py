"""Clients and upstreams that speak HTTP/2 and nothing else are told the remedy."""

import contextlib
import ssl

import pytest

from tests.raw import Origin, Wire
from tests.stack import Stack
from tests.tunnelled import Tls, refused_by_upstream, trusting


def test_a_client_that_speaks_http2_only_is_told_the_remedy(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    for offered, trusted in ((["h2"], True), (["h2"], False), (["h2", "http/1.1"], True)):
        context = trusting(shared) if trusted else ssl.create_default_context()
        context.set_alpn_protocols(offered)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            Tls.through(attempt, "127.0.0.1:8443", context).close()
    hints = shared.sandbox.wait_for(lambda: attempt.report()["hints"], what="a note")
    assert hints[0] == (
        "127.0.0.1: this client speaks HTTP/2 only (gRPC?), which is not opened here. To pass it through, "
        'unjournalled: [[route]] host = "127.0.0.1:8443", effect = "tunnel" in twiceshy.toml'
    )
    assert not [hint for hint in hints if "trust the CA" in hint and "hung up right after" not in hint]


@pytest.mark.parametrize("how", ["alert", "frames", "frames at once"])
def test_an_upstream_that_speaks_http2_only_is_told_with_the_remedy(shared: Stack, run: str, how: str) -> None:
    attempt = shared.claim(run)
    scheme = "https" if how == "alert" else "http"
    with Origin() as origin:
        client = Wire.to(attempt)
        client.send(
            f"POST /@{run}:{attempt.token}/{scheme}/127.0.0.1:{origin.port}/pkg.Service/Call HTTP/1.1\r\n"
            f"Host: localhost:{attempt.port}\r\nContent-Length: 2\r\n\r\nhi".encode()
        )
        upstream = origin.accept()
        if how == "alert":
            assert upstream.exactly(1) == b"\x16"
            upstream.send(b"\x15\x03\x03\x00\x02\x02\x78")  # no_application_protocol
        else:
            if how == "frames":
                upstream.head()
            upstream.send(b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0d" + b"\0\0\x08\7\0\0\0\0\0\0\0\0\0\0\0\0\1")
        upstream.close()
        words = refused_by_upstream(client)
        assert f'[[route]] host = "127.0.0.1:{origin.port}", effect = "tunnel"' in words
    rows = shared.fetch("SELECT state FROM twiceshy.step WHERE run_id = $1", run)
    assert [row["state"] for row in rows] == ["not_sent"]
