"""What was answered, as people may see it: credentials masked. The journal itself keeps answers whole. Pure."""

import re

from runtime.entries import Headers

#: How much of a body is shown, in characters.
SHOWN = 2000
MASK = "…"
_SECRET = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|(?:api|access|private)[_-]?key|authorization|credential|cookie|signature)"
    r"[\w.-]*"
)
_HEADER = re.compile(rf"{_SECRET}|(?:www|proxy)-authenticate", re.IGNORECASE)
_MEMBER = re.compile(rf'("{_SECRET}"\s*:\s*")(?:[^"\\]|\\.)*("|\\?$)', re.IGNORECASE)
_PAIR = re.compile(rf"(?<![\w.-])({_SECRET}=)[^&\s]*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


def headers(given: Headers) -> list[tuple[str, str]]:
    """Names and values; the values of those that carry credentials masked."""
    return [
        (name.decode("latin-1"), MASK if _HEADER.fullmatch(name.decode("latin-1")) else value.decode("latin-1"))
        for name, value in given
    ]


def body(beginning: bytes | None, given: Headers) -> str | None:
    """The beginning of a body, if it is text, with what looks like a credential masked."""
    if beginning is None or any(name.lower() == b"content-encoding" for name, _ in given):
        return None
    try:
        text = beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(beginning) - 4:  # else a character is cut at the end
            return None
        text = beginning[: error.start].decode("utf-8")
    text = _MEMBER.sub(rf"\1{MASK}\2", text)
    text = _PAIR.sub(rf"\1{MASK}", text)
    return _BEARER.sub(rf"\1 {MASK}", text)[:SHOWN]
