"""A sidecar that writes a line for each refusal it gives; it refuses every run whose name begins with ``parked``."""

import json
import sys

from proxy import relay, sidecar
from proxy.attempts import Attempts, Run
from proxy.identity import Named
from proxy.refusals import Refusal
from proxy.relay import Client

_refuse, _of = relay.refuse, Attempts.of


async def refuse(client: Client, refusal: Refusal) -> None:
    tunnel = client.door.tunnel
    to = None if tunnel is None else [tunnel.target.host, tunnel.target.port]
    print(json.dumps({"refused": refusal.code, "to": to}), file=sys.stderr, flush=True)
    await _refuse(client, refusal)


async def of(self: Attempts, named: Named) -> Run | Refusal:
    if named.run.startswith("parked"):
        return Refusal("parked", f"Run {named.run} is parked: it waits, and will be started again.", named.run)
    return await _of(self, named)


if __name__ == "__main__":
    relay.refuse = refuse
    Attempts.of = of  # type: ignore[method-assign]
    sys.exit(sidecar.main())
