"""Tunnels that are not opened: to hosts whose rule says ``effect = "tunnel"``.

Nothing inside can be seen, so nothing is journalled; but whose tunnel it is, and where it goes, is asked like for any
request. Until that is known the client's bytes wait. What must be refused is said inside the tunnel like everywhere
(``CONNECT`` is always accepted): it is opened then, and whoever asks in it gets the words.
"""

from dataclasses import replace

from proxy.admission import Admission
from proxy.attempts import Attempts
from proxy.doors import Door
from proxy.identity import Tunnel
from proxy.passage import Passage
from proxy.profiles import Rules
from proxy.refusals import Refusal
from proxy.upstream import Denied, NotSent, Upstream
from runtime.errors import DatabaseAway, Unreadable
from runtime.settings import Settings


def is_blind(rules: Rules, tunnel: Tunnel) -> bool:
    """Whether *tunnel* leads to a host that is not opened."""
    target = tunnel.target
    return tunnel.refusal is None and not target.internal and rules.is_blind(target.host, target.port)


class Blind:
    """Passes tunnels through. One per sidecar."""

    def __init__(self, admission: Admission, attempts: Attempts, upstream: Upstream, settings: Settings) -> None:
        self._admission = admission
        self._attempts = attempts
        self._upstream = upstream
        self._settings = settings

    async def __call__(self, door: Door) -> None:
        """Serve the tunnel at *door* to its end, or have it opened for a refusal."""
        tunnel = door.tunnel
        assert tunnel is not None
        refusal = await self._pass(door, tunnel)
        if refusal is not None:
            if tunnel.named is not None:
                door.tunnel = replace(tunnel, refusal=refusal)
            # Else the run may be named inside, by headers.
            door.open_after_all()

    async def _pass(self, door: Door, tunnel: Tunnel) -> Refusal | None:
        target = tunnel.target
        try:
            run = await self._admission.of(tunnel.named, target, door)
            if isinstance(run, Refusal):
                return run
            refusal = self._admission.out_of_reach(target)
            if refusal is not None:
                return refusal
            answers, upstream = await self._upstream.open(target.host, target.port, tls=False)
        except (DatabaseAway, Unreadable) as error:
            return Refusal(
                "database-away" if isinstance(error, DatabaseAway) else "internal", f"{error} Nothing was sent."
            )
        except Denied as error:
            return Refusal("denied", f"{error}. Nothing was sent.")
        except NotSent as error:
            return Refusal("upstream", f"{target.shown}: {error}. Nothing was sent.")
        with Passage(self._attempts, self._settings, run, target, "tunnel", door, upstream) as passage:
            await passage.carry(door.pass_through(), answers)
        return None
