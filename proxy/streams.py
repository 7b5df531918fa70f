"""Streams of server-sent events: which bytes may pass before the record is committed. Pure."""


class Hold:
    """Tells how much of an answer's body may pass to the client.

    A known dialect over ``text/event-stream``: whole events pass at once, the terminal event and what
    follows is held. Anything else passes as it comes (the framing holds the end, elsewhere). Keeps no
    bytes for the caller: the caller has them in its record.
    """

    ended: bool  # the terminal event was seen whole
    strict: bool  # a terminal event is expected: an end without it is a truncated answer

    def __init__(self, dialect: str | None, content_type: bytes, encoding: bytes | None = None) -> None:
        raise NotImplementedError

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes; say how many of all bytes fed so far may pass now. Never shrinks."""
        raise NotImplementedError

    def close(self) -> bool:
        """The body has ended; says ``ended``, with a last event counted that lacks only its blank line."""
        raise NotImplementedError


def usage(dialect: str | None, content_type: bytes, body: bytes, encoding: bytes | None = None) -> int:
    """The provider's count of tokens in all, 0 if unknown. Never raises."""
    raise NotImplementedError
