"""Which rule a request falls under: its effect class, where its key goes, what to ignore. Pure.

Rules are data: the user's ``[[route]]`` tables first, then ``profiles.toml`` beside this file, then what
holds for a host that nobody described. The data file is the only place that knows a provider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from proxy.message import Request
from runtime.step import Effect

SdkKey = Literal["none", "caller", "random_per_call", "random_per_attempt"]


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where the idempotency key stands on the wire, and what is known of it."""

    name: str  # of the header
    retention: float | None = None  # seconds, None: not known
    sdk: SdkKey = "none"
    where: Literal["header"] = "header"

    @property
    def kept_over_retries(self) -> bool:
        """The SDK makes a key per call and keeps it over its own retries: another random key, another call."""
        return self.sdk == "random_per_call"


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """What headers mean, all names in lower case; a name in ``noise`` may end in ``*``."""

    compared: frozenset[str] = frozenset()  # take part in the fingerprint, beside those that HTTP itself defines
    noise: frozenset[str] = frozenset()  # differ between two equal requests: in no print at all
    retry_count: frozenset[str] = frozenset()  # "2": the second repetition; "attempt=2; max=3": the first
    retry_id: frozenset[str] = frozenset()  # equal in all tries of one call


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for a request. ``match`` gives the same object to equal requests."""

    name: str
    effect: Effect
    key: KeyPlace | None = None
    ignore: tuple[str, ...] = ()
    dialect: str | None = None
    stores_errors: bool = False
    in_flight: frozenset[int] = frozenset()
    not_processed: frozenset[int] = frozenset()
    #: The key is ours by default, on a host that may ignore it: the class stays at_most_once.
    assigned_key: bool = False
    secret_query: frozenset[str] = frozenset()
    kind: str = ""
    headers: HeaderNames = HeaderNames()

    def retention(self, method: str) -> float:
        """How long after the first sending the same bytes may be sent again, in seconds (DESIGN §3.4)."""
        raise NotImplementedError


class Rules:
    """All rules in their order. ``hash`` names them: a step remembers under which ones it was printed."""

    hash: bytes  # 32 bytes

    @classmethod
    def load(
        cls,
        routes: list[dict[str, Any]],
        *,
        origin: str = "twiceshy.toml",
        assigned_key: str | None = "Idempotency-Key",
    ) -> Rules:
        """Compile *routes* (the user's, from the file *origin*) before the built-in ones.

        *assigned_key*: the header that POST and PATCH to undescribed hosts get, None for none.
        UsageError names file, route and field.
        """
        raise NotImplementedError

    def match(self, request: Request) -> Rule:
        """The first rule that *request* falls under; there is always one."""
        raise NotImplementedError
