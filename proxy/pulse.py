"""The sidecar's own lease: renewed each third of it, and trusted only as far as the database has confirmed it."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from runtime.lease import believed_until


class Pulse:
    """*renew* renews the lease and learns which runs are still this sidecar's; False: it was declared dead.

    The lease is believed only when that is known, too: while it had ended, runs may have been taken over.
    """

    def __init__(self, lease: float, renew: Callable[[], Awaitable[bool]]) -> None:
        self._lease = lease
        self._renew = renew
        self._confirmed = time.monotonic()
        self._renewing = asyncio.Lock()

    def alive(self) -> bool:
        """True while no other sidecar can believe this one dead, with some of the lease to spare."""
        return time.monotonic() < believed_until(self._confirmed, self._lease)

    async def beat(self) -> None:
        """Renew the lease. Raises DatabaseAway."""
        async with self._renewing:
            await self._beat()

    async def revive(self) -> None:
        """Renew the lease at once if it may have ended. Raises DatabaseAway."""
        async with self._renewing:
            if not self.alive():
                await self._beat()

    async def _beat(self) -> None:
        asked = time.monotonic()
        if await self._renew():
            self._confirmed = asked
