"""A host that is gone with its worker and its agent: nobody closes its connections, and nothing comes from them.

The other host is a network namespace at the end of a cable that can be cut. Where none can be made (it takes root, and
a kernel that lets it), this is skipped.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import queue
from runtime.database import connect
from tests.stack import Attempt, stack

LEASE = 6.0
HERE, THERE = "10.213.77.1", "10.213.77.2"
#: An agent, at the other end of the cable.
AGENT = """
import base64, http.client, json, sys
host, port, run, token, url, body = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port))
credentials = base64.b64encode(f"{run}:{token}".encode()).decode()
headers = {"Proxy-Authorization": f"Basic {credentials}", "Content-Type": "application/json"}
connection.request("POST", url, body, headers)
print(connection.getresponse().status)
"""


class Host:
    """Another host. Its name is that of its network namespace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        near, far = f"{self.name}a", f"{self.name}b"
        _ip("netns", "add", self.name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        _ip("addr", "add", f"{HERE}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", self.name, "addr", "add", f"{THERE}/30", "dev", far)
        _ip("-n", self.name, "link", "set", far, "up")

    def start(self, *command: str) -> None:
        self.processes.append(subprocess.Popen(["ip", "netns", "exec", self.name, *command]))

    def vanish(self) -> None:
        """The cable is cut, and then it is dead: nobody here is told."""
        _ip("-n", self.name, "link", "set", f"{self.name}b", "down")
        for process in self.processes:
            process.kill()
            process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(f"ts{time.monotonic_ns() % 10**8}")
    try:
        try:
            made.connect()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no second host can be made here ({getattr(error, 'stderr', None) or error})")
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
        subprocess.run(["ip", "netns", "del", made.name], check=False, capture_output=True)


@pytest.mark.check_all
async def test_a_long_call_of_a_dead_host_may_be_taken_over_after_two_leases_and_is_made_once(
    dsn: str, tmp_path: Path, run: str, host: Host
) -> None:
    gone: dict[str, Any] = {"worker": "gone", "host": "there", "folder": "/state", "lease": LEASE}
    here: dict[str, Any] = {"worker": "me", "host": "here", "folder": "/state", "lease": LEASE}
    with stack(dsn, tmp_path, lease=LEASE, host="0.0.0.0") as made:
        made.sandbox.fault(match={"path": "/v1/chat/completions"}, hold="call")
        connection = await connect(dsn, name="test")
        try:
            await queue.start(connection, "a", None, run_id=run)
            first = await queue.claim_next(connection, ["a"], **gone)
            assert first is not None
            url = made.url("/v1/chat/completions")
            body = '{"model": "gpt-sandbox", "messages": [{"role": "user", "content": "take your time"}]}'
            host.start(
                sys.executable, "-c", AGENT, HERE, str(made.sidecar.port), run, first.claim.token, url, body
            )  # fmt: skip
            await asyncio.to_thread(made.sandbox.wait_held, "call")
            # Longer than a lease, of which nobody but the open call renews it.
            await asyncio.sleep(LEASE * 1.5)
            assert await queue.requeue_silent(connection, lease=LEASE, backoff=0.0) is None
            host.vanish()
            vanished = time.monotonic()
            while await queue.requeue_silent(connection, lease=LEASE, backoff=0.0) is None:
                assert time.monotonic() - vanished < 2 * LEASE + 1
                await asyncio.sleep(0.1)
            second = await queue.claim_next(connection, ["a"], **here)
            assert second is not None
        finally:
            await connection.close()
        agent = Attempt(run, second.claim.token, made.sidecar.port)
        asked = agent.in_background("POST", url, body, {"Content-Type": "application/json"})
        await asyncio.to_thread(made.sandbox.wait_for, lambda: agent.steps() != [], what="it has joined")
        made.sandbox.release("call")
        reply = await asyncio.to_thread(asked.result)
        assert reply.status == 200
        assert len(made.received("llm")) == 1
