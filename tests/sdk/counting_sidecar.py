"""A sidecar that writes a line for each refusal it gives."""

import json
import sys

from proxy import relay, sidecar
from proxy.refusals import Refusal
from proxy.relay import Client

_refuse = relay.refuse


async def refuse(client: Client, refusal: Refusal) -> None:
    tunnel = client.door.tunnel
    to = None if tunnel is None else [tunnel.target.host, tunnel.target.port]
    print(json.dumps({"refused": refusal.code, "to": to}), file=sys.stderr, flush=True)
    await _refuse(client, refusal)


if __name__ == "__main__":
    relay.refuse = refuse
    sys.exit(sidecar.main())
