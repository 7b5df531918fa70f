"""Who may have something sent, and where to, before anything of a request or a tunnel is looked at.

The same for requests, WebSockets and tunnels that are not opened: the run is named, its token current, the run
running (DESIGN §2, §3.2).
"""

import ipaddress

from proxy.attempts import Attempts
from proxy.doors import Door
from proxy.identity import Named, Target, is_address
from proxy.refusals import Refusal
from proxy.run import Run
from proxy.tokenless import Tokenless
from runtime.settings import Settings


class Admission:
    """Asks the attempts. One per sidecar."""

    def __init__(self, attempts: Attempts, tokenless: Tokenless, settings: Settings) -> None:
        self._attempts = attempts
        self._tokenless = tokenless
        self._settings = settings

    async def of(self, named: Named | None, target: Target, door: Door) -> Run | Refusal | None:
        """The attempt that the client at *door* speaks for; None: for none, and is let pass. Raises DatabaseAway."""
        if named is None:
            if self._settings.unidentified == "pass" and not target.internal:
                return None
            return Refusal(
                "no-run",
                f"The request to {target.host} names no run. Start the agent with `twiceshy run`, or "
                "give RUN:TOKEN in the proxy address, or send Twiceshy-Run. Nothing was sent.",
            )
        if named.token is not None:
            return await self._attempts.of(named)
        return await self._tokenless.of(named, door, internal=target.internal)

    def out_of_reach(self, target: Target) -> Refusal | None:
        """Why this mode does not go to *target*."""
        if self._settings.mode == "durable" or target.internal or _is_loopback(target.host):
            return None
        return Refusal(
            "denied",
            f"Mode {self._settings.mode} is for comparison and may do things twice: it only talks to upstreams on "
            f"this machine, not to {target.host}. Nothing was sent.",
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
