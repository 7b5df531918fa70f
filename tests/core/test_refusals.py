"""How the sidecar says no: so that no SDK tries again, and every SDK's exception shows why (DESIGN §2)."""

import json
from xml.etree import ElementTree as ET

import pytest

from proxy.refusals import CODES, RETRYABLE, Refusal, reads_xml

EACH = pytest.mark.parametrize("code", list(CODES))
#: Statuses that some client retries by itself (measured with 27), and 421, which Node's fetch does.
RETRIED = frozenset({408, 409, 421, 429} | set(range(500, 600)))
#: What these say is no stop, or no answer to an agent's request to an upstream.
NO_STOP = frozenset({"database-away", "upstream", "upstream-timeout", "internal"})


def headers(refusal: Refusal) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in refusal.headers()}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("fenced", 423), ("sidecar-changed", 423), ("diverged", 412), ("ambiguous", 424), ("parked", 425),
        ("no-run", 428), ("no-attempt", 428), ("denied", 403), ("over-budget", 403), ("bad-request", 400),
        ("body-too-large", 413), ("database-away", 503), ("upstream", 502), ("upstream-timeout", 504),
    ],
)  # fmt: skip
def test_the_statuses_are_the_designs(code: str, status: int) -> None:
    assert Refusal(code, "").status == status


@pytest.mark.parametrize("code", sorted(set(CODES) - NO_STOP))
def test_a_stop_has_a_status_that_nobody_retries(code: str) -> None:
    """Never 408, 409, 421, 429, 5xx."""
    assert Refusal(code, "").status not in RETRIED


@EACH
def test_a_refusal_says_whether_to_try_again(code: str) -> None:
    sent = headers(Refusal(code, "words"))
    no = {"x-should-retry": "false", "stripe-should-retry": "false"}
    assert ({name: sent.get(name) for name in no} == no) is (code not in RETRYABLE)
    assert ("Retry-After" in sent) is (code == "database-away")


@EACH
def test_a_refusal_names_its_code(code: str) -> None:
    """``Twiceshy-Error: CODE``; what fails upstream is ``upstream``, whatever it was."""
    expected = "upstream" if code == "upstream-timeout" else code
    assert headers(Refusal(code, "words"))["Twiceshy-Error"] == expected


@EACH
def test_every_sdks_exception_shows_the_words(code: str) -> None:
    refusal = Refusal(code, "Run r is stopped: \N{EURO SIGN} \ud800", "r", "s")
    said = json.loads(refusal.body())
    assert said["detail"] == said["message"] == said["error"]["message"] == refusal.message
    assert said["error"]["type"] == "twiceshy_" + code.replace("-", "_")
    assert (said["status"], said["title"]) == CODES[code]
    assert (said["run"], said["step"], said["ok"]) == ("r", "s", False)
    assert headers(refusal)["Content-Type"] == "application/problem+json"


@EACH
def test_the_reason_phrase_tells_it_too(code: str) -> None:
    reason = Refusal(code, "").reason
    assert reason.isascii()
    assert not set(reason) & set(b"\r\n")
    assert b"twiceshy" in reason or code.startswith("upstream")


def test_step_and_run_are_told_where_they_are_known() -> None:
    assert headers(Refusal("ambiguous", "", "r", "mail#1"))["Twiceshy-Step"] == "mail#1"
    assert "Twiceshy-Step" not in headers(Refusal("fenced", "", "r"))
    assert not {"run", "step"} & set(json.loads(Refusal("no-run", "").body()))


@pytest.mark.parametrize("step", ["a", "\N{EURO SIGN}", "ä"])
def test_headers_are_always_bytes(step: str) -> None:
    for name, value in Refusal("ambiguous", "\N{EURO SIGN}", "r", step).headers():
        assert name.isascii()
        assert not set(value) & set(b"\r\n\0")


@EACH
def test_who_reads_no_json_is_told_in_xml(code: str) -> None:
    """As AWS's services have it: botocore shows code and message."""
    refusal = Refusal(code, 'Run r is <stopped> & "done": \N{EURO SIGN} \ud800\0', "r", "s")
    error = ET.fromstring(refusal.body(xml=True)).find("Error")
    assert error is not None
    assert error.findtext("Code") == "twiceshy_" + code.replace("-", "_")
    assert error.findtext("Message") == 'Run r is <stopped> & "done": \N{EURO SIGN}   '
    sent = dict(refusal.headers(xml=True))
    assert sent.pop(b"Content-Type") == b"application/xml"
    assert sent.items() < dict(refusal.headers()).items()


SCOPE = b"AWS4-HMAC-SHA256 Credential=A/20260101/eu-central-1/%s/aws4_request, SignedHeaders=host, Signature=f"


@pytest.mark.parametrize(
    ("headers", "xml"),
    [
        ({}, False),
        ({b"Authorization": b"Bearer AWS4-"}, False),
        ({b"Authorization": SCOPE % b"s3"}, True),
        ({b"authorization": SCOPE % b"s3", b"content-type": b"application/json"}, True),
        ({b"Authorization": SCOPE % b"sns", b"Content-Type": b"application/x-www-form-urlencoded"}, True),
        ({b"Authorization": SCOPE % b"sqs", b"X-Amz-Target": b"AmazonSQS.SendMessage"}, False),
        ({b"Authorization": SCOPE % b"bedrock", b"Content-Type": b"application/json"}, False),
        ({b"Authorization": b"AWS4-HMAC-SHA256 nonsense"}, True),
    ],
)
def test_who_reads_no_json(headers: dict[bytes, bytes], xml: bool) -> None:
    assert reads_xml(tuple(headers.items())) is xml


def test_what_somebody_made_up_is_not_repeated_whole() -> None:
    refusal = Refusal("bad-request", f"step {'n' * 20_000!r} of run r", "r", "n" * 20_000)
    said = json.loads(refusal.body())
    assert said["message"].startswith("step 'nnn")
    assert said["message"].endswith("… (20002 characters) of run r")
    assert len(refusal.body()) < 2000
    assert "step" not in said
    for made_up in ("n" * 201, "a\r\nX-Mine: 1", "é", ""):
        headers = dict(Refusal("bad-request", "no", "r", made_up).headers())
        assert headers.get(b"Twiceshy-Step", b"") == b""
    many = Refusal("bad-request", "word " * 20_000)
    assert len(json.loads(many.body())["message"]) < 9000
