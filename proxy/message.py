"""A request as the pure parts see it. Pure."""

from dataclasses import dataclass, field

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """An agent's request, read whole, addressed, and free of everything that was meant for the sidecar.

    ``headers`` are the end-to-end ones in the order they came, names in the casing they came in, values as
    bytes; Host, hop-by-hop, ``Proxy-*`` and ``Twiceshy-*`` are not among them.
    """

    method: str
    scheme: str  # "http" or "https"
    host: str  # lower case, without brackets
    port: int
    target: str  # raw path and query, byte for byte, starting with "/"
    headers: Headers
    body: bytes
    # Headers are asked for some twenty times a request.
    _first: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def header(self, name: str) -> bytes | None:
        """The first value of header *name* (any casing), or None."""
        first = self._first
        if first is None:
            first = {key.lower(): value for key, value in reversed(self.headers)}
            object.__setattr__(self, "_first", first)
        return first.get(name.lower().encode("latin-1"))

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def authority(self) -> str:
        """Host and port as a Host header says it: the scheme's default port is left out, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"
