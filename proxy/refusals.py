"""What the sidecar says when it says no. Pure.

Problem JSON (RFC 9457) that also has the shapes in which SDKs look for a message, the words in the reason
phrase too, and headers that keep every SDK from trying again. For AWS clients that read no JSON: XML. Statuses:
DESIGN §2, none of which any of 27 measured clients retries. ``Twiceshy-Error`` carries the code.
"""

import json
from dataclasses import dataclass
from html import escape

from runtime.names import readable

Headers = tuple[tuple[bytes, bytes], ...]
PROBLEM = b"application/problem+json"
#: How long a step's key may be.
KEY_MAX = 200

#: code -> (status, title). The docs list each one; a test holds the two together.
CODES: dict[str, tuple[int, str]] = {
    "fenced": (423, "Locked by twiceshy: run taken over"),
    "sidecar-changed": (423, "Locked by twiceshy: the attempt lived with another sidecar"),
    "diverged": (412, "Stopped by twiceshy: run diverged"),
    "ambiguous": (424, "Stopped by twiceshy: outcome unknown, a person must decide"),
    "parked": (425, "Parked by twiceshy"),
    "no-run": (428, "Refused by twiceshy: no run named"),
    "no-attempt": (428, "Refused by twiceshy: no attempt"),
    "denied": (403, "Denied by twiceshy"),
    "over-budget": (403, "Stopped by twiceshy: over budget"),
    "not-running": (423, "Locked by twiceshy: the run is not running"),
    "continued": (423, "Locked by twiceshy: the run goes on as another one"),
    "bad-request": (400, "Bad Request to twiceshy"),
    "bad-identity": (400, "Bad Request to twiceshy: run or token malformed"),
    "body-too-large": (413, "Content Too Large for twiceshy"),
    "not-found": (404, "Not Found at twiceshy.internal"),
    "database-away": (503, "Held by twiceshy: its database is away, nothing was sent"),
    "upstream": (502, "Bad Gateway: upstream failed"),
    "upstream-timeout": (504, "Gateway Timeout: upstream silent"),
    "internal": (500, "twiceshy failed"),
}

#: Codes that are an upstream's failure or our own outage: a client may try again.
RETRYABLE = frozenset({"database-away", "upstream", "upstream-timeout"})


def ways_out(run_id: str) -> str:
    """What the agent of a run that was named without a token can do about a ``no-attempt``."""
    return (
        "Name each step with a Twiceshy-Step header, or start the agent with "
        f"`twiceshy run --run {run_id} -- COMMAND`, or give it a token of `twiceshy claim {run_id}`."
    )


def http2_only(host: str, port: int, who: str) -> str:
    """What can be done where *who* (the client, or the upstream at *host*) speaks HTTP/2 and nothing else."""
    name = f"[{host}]" if ":" in host else host
    pattern = ascii(name if port == 443 else f"{name}:{port}")[1:-1][:200]
    return (
        f"{who} speaks HTTP/2 only (gRPC?), which is not opened here. To pass it through, unjournalled: "
        f'[[route]] host = "{pattern}", effect = "tunnel" in twiceshy.toml'
    )


def reads_xml(headers: Headers) -> bool:
    """Whether who sends *headers* reads errors as XML: AWS but for its JSON services (S3, SNS, EC2, …)."""
    given = {name.lower(): value for name, value in headers}
    authorization = given.get(b"authorization", b"")
    if not authorization.startswith(b"AWS4-") or b"x-amz-target" in given:
        return False
    scope = authorization.partition(b"Credential=")[2].partition(b",")[0].split(b"/")
    # What is put into S3 may well be JSON.
    return b"/json" not in given.get(b"content-type", b"") or scope[-2:-1] == [b"s3"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of the sidecar's own. ``message``: what happened, which run and step, what to do next."""

    code: str
    message: str
    run: str | None = None
    step: str | None = None
    resume_at: str | None = None  # when a parked run goes on at the latest

    @property
    def status(self) -> int:
        return CODES[self.code][0]

    @property
    def reason(self) -> bytes:
        return CODES[self.code][1].encode("ascii")

    def headers(self, *, xml: bool = False) -> Headers:
        """*xml*: of the answer to a client that reads no JSON, see ``reads_xml``."""
        wire_code = "upstream" if self.code == "upstream-timeout" else self.code
        out = [
            (b"Content-Type", b"application/xml" if xml else PROBLEM),
            (b"Twiceshy-Error", wire_code.encode("ascii")),
        ]
        if self.code == "database-away":
            out.append((b"Retry-After", b"5"))
        elif self.code not in RETRYABLE:
            out += [(b"x-should-retry", b"false"), (b"stripe-should-retry", b"false")]
        if self.resume_at is not None:
            out.append((b"Twiceshy-Resume-At", self.resume_at.encode("ascii")))
        if self.step is not None and _is_key(self.step):
            out.append((b"Twiceshy-Step", self.step.encode("ascii")))
        return tuple(out)

    def body(self, *, xml: bool = False) -> bytes:
        kind = "twiceshy_" + self.code.replace("-", "_")
        said = readable(self.message)
        if xml:
            # Of XML 1.0 no escape can carry what is left out here.
            words = "".join(each if each.isprintable() else " " for each in said)
            error = f"<Error><Code>{kind}</Code><Message>{escape(words)}</Message></Error>"
            return f"<ErrorResponse>{error}</ErrorResponse>\n".encode("ascii", "xmlcharrefreplace")
        problem: dict[str, object] = {
            "type": f"about:blank#{self.code}",
            "title": CODES[self.code][1],
            "status": self.status,
            "detail": said,
            "error": {"type": kind, "code": self.code, "message": said},
            "message": said,
            "ok": False,
        }
        if self.run is not None:
            problem["run"] = self.run
        if self.step is not None and _is_key(self.step):
            problem["step"] = self.step
        return json.dumps(problem).encode("ascii") + b"\n"


def _is_key(step: str) -> bool:
    """Whether *step* may be one: who asks for one that is not there may have made it up."""
    return len(step) <= KEY_MAX and step.isascii() and step.isprintable()
