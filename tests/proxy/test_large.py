"""Large bodies: answers are recorded whole whatever their clients do, in a memory that does not grow with them."""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from sandbox.anything import Pattern
from tests.conftest import fresh_database
from tests.raw import PATIENCE, Origin, Wire, asked, headers, request
from tests.stack import Attempt, Stack, stack

MB = 1 << 20
SIZE = 200_000_000
#: What the sidecar may grow by, for an answer of that size.
GROWTH = 64 * MB
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar whose lease is a second, and that waits a second for its database."""
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("hasty"), lease=1, database_wait=1) as made:
            yield made


class Memory:
    """How much a sidecar has grown since it had done everything once."""

    def __init__(self, stack: Stack, run: str) -> None:
        stack.claim(run + "-warm").ask("POST", stack.url("/any/warm?size=3000000"), b"x")
        self._stack = stack
        self._before = stack.sidecar.memory()
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, self._stack.sidecar.memory() - self._before)


def asking(attempt: Attempt, method: str, url: str, receive_buffer: int = 1 << 16) -> Wire:
    """A client with a small buffer of its own."""
    client = Wire.to(attempt, receive_buffer=receive_buffer)
    client.send(request(attempt, method, url, body=b"x" if method == "POST" else None))
    return client


def slowly(client: Wire, done: Callable[[], bool], memory: Memory | None = None) -> bytes:
    """Read at about 1 KB/s until *done*."""
    got, until = b"", time.monotonic() + 3 * PATIENCE
    while not done():
        assert time.monotonic() < until, "not in time"
        got += client.exactly(64)
        if memory is not None:
            memory.look()
        time.sleep(0.06)
    return got


def digest(client: Wire, size: int, begun: bytes = b"", memory: Memory | None = None) -> str:
    """Of a body of *size*, the rest of which is read at full speed."""
    sha, left = hashlib.sha256(begun), size - len(begun)
    while left:
        data = client.exactly(min(left, 1 << 16))
        sha.update(data)
        left -= len(data)
        if memory is not None and not left % 50:
            memory.look()
    return sha.hexdigest()


def expected(head: bytes, size: int) -> str:
    """The digest of what the sandbox sent with *head*."""
    sha = hashlib.sha256()
    for block in Pattern(size, int(dict(headers(head))[b"Sandbox-Serial"])):
        sha.update(block)
    return sha.hexdigest()


def recorded(stack: Stack, run: str) -> list[tuple[int, bool]]:
    rows = stack.fetch("SELECT size, whole FROM twiceshy.answer WHERE run_id = $1", run)
    return [(row["size"], row["whole"]) for row in rows]


def files(stack: Stack) -> list[str]:
    """The files without a name that the sidecar has open."""
    found = []
    for link in Path(f"/proc/{stack.sidecar.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return [each for each in found if each.endswith("(deleted)")]


def parts(stack: Stack, run: str) -> int:
    (row,) = stack.fetch("SELECT count(*) AS n FROM twiceshy.body WHERE run_id = $1", run)
    return int(row["n"])


# ---- 200 MB


def test_200_mb_to_a_post_read_at_1_kb_s(
    shared: Stack, run: str, record_property: Callable[[str, object], None]
) -> None:
    memory = Memory(shared, run)
    url = shared.url(f"/any/large?size={SIZE}")
    first = shared.claim(run)
    client = asking(first, "POST", url)
    head = client.head()
    begun = slowly(client, lambda: bool(recorded(shared, run)), memory)
    # Recorded whole while the client still reads.
    assert recorded(shared, run) == [(SIZE, True)]
    assert len(begun) < MB
    assert digest(client, SIZE, begun, memory) == expected(head, SIZE)
    shared.end(first, "died")

    # Replayed: to a slow reader, and to one that takes it all.
    second = shared.claim(run)
    slow = asking(second, "POST", url)
    assert b"Twiceshy-Replayed: true\r\n" in slow.head()
    until = time.monotonic() + 0.5
    slowly(slow, lambda: time.monotonic() > until, memory)
    slow.close()
    again = asking(second, "POST", url)
    assert b"Twiceshy-Replayed: true\r\n" in again.head()
    assert digest(again, SIZE, memory=memory) == expected(head, SIZE)
    assert len(shared.received("any")) == 2  # with the one for warmth
    record_property("growth in MB", round(memory.most / MB, 1))
    print(f"200 MB: grown by {memory.most / MB:.1f} MB")
    assert memory.most < GROWTH


def test_200_mb_to_a_get_end_with_their_client(shared: Stack, run: str) -> None:
    memory = Memory(shared, run)
    shared.sandbox.fault(match={"method": "GET"}, hold_events={"1500": "middle"})  # after 98 MB
    client = asking(shared.claim(run), "GET", shared.url(f"/any/large?size={SIZE}"))
    client.head()
    shared.sandbox.wait_held("middle")
    shared.sandbox.wait_for(lambda: parts(shared, run) > 10)
    client.close()

    def ended() -> bool:
        return [each.end for each in shared.received(method="GET")] == ["gone"]

    shared.sandbox.wait_for(ended)
    memory.look()
    assert memory.most < GROWTH
    # Nothing is kept of it.
    assert recorded(shared, run) == []
    shared.sandbox.wait_for(lambda: parts(shared, run) == 0)
    shared.sandbox.wait_for(lambda: not files(shared))


# ---- slow clients


def test_a_client_may_stop_reading_for_longer_than_a_lease(hasty: Stack, run: str) -> None:
    hasty.mark()
    size = 30_000_000
    attempt = hasty.claim(run)
    client = asking(attempt, "POST", hasty.url(f"/any/x?size={size}"))
    head = client.head()
    hasty.sandbox.wait_for(lambda: recorded(hasty, run))
    assert recorded(hasty, run) == [(size, True)]
    time.sleep(3.5)  # what is shown is that nothing happens
    assert attempt.steps()[0][1] == "live"
    assert digest(client, size) == expected(head, size)


def test_whoever_has_read_an_answer_and_closes_at_once_has_had_it(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    bodies = set()
    for _ in range(3):
        client = asking(attempt, "GET", shared.url("/any/poll?size=60000"), receive_buffer=1 << 13)
        head = client.head()
        # The sidecar looks ever more rarely for what is acknowledged, and so will first see that the client is gone.
        time.sleep(0.3)
        bodies.add(digest(client, 60_000))
        client.close()
        assert expected(head, 60_000) in bodies
        assert attempt.ask("GET", shared.url("/pantry")).status == 200
    assert len(bodies) == len(shared.received("any")) == 3


def test_a_client_that_never_reads_holds_up_nobody(shared: Stack, run: str) -> None:
    size = 30_000_000
    attempt = shared.claim(run)
    url = shared.url(f"/any/x?size={size}")
    deaf = asking(attempt, "POST", url)
    shared.sandbox.wait_for(lambda: recorded(shared, run))
    assert recorded(shared, run) == [(size, True)]
    assert attempt.ask("GET", shared.url("/pantry")).status == 200
    # It had nothing of it: whoever asks for it next in its place is given it.
    assert len(files(shared)) == 1
    deaf.reset()
    shared.sandbox.wait_for(lambda: not files(shared))
    other = asking(attempt, "POST", url)
    head = other.head()
    assert digest(other, size) == expected(head, size)
    assert len(shared.received("any")) == 1


def test_a_client_that_is_slow_has_all_that_came_before_the_cut(shared: Stack, run: str, origin: Origin) -> None:
    body = bytes(range(256)) * 16 * 1024  # more than buffers take
    first = shared.claim(run)
    client = asking(first, "POST", origin.url("/orders"))
    upstream = origin.accept()
    upstream.head()
    upstream.exactly(1)
    upstream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1) + body)
    client.head()
    upstream.close()
    shared.sandbox.wait_for(lambda: recorded(shared, run))
    assert recorded(shared, run) == [(len(body), False)]
    assert client.rest_of_cut() == body
    assert first.ask("POST", shared.url("/crm/notes"), {"text": "acted on it"}).status // 100 == 2
    shared.end(first, "died")

    again = asking(shared.claim(run), "POST", origin.url("/orders"))
    assert b"Twiceshy-Replayed: true\r\n" in again.head()
    assert again.rest_of_cut() == body
    assert origin.nobody()


# ---- on the way


def test_a_large_stream_is_joined_from_its_first_byte(shared: Stack, run: str, origin: Origin) -> None:
    event = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"x" * 100_000)
    chunk = b"%x\r\n%s\r\n" % (len(event), event)
    last = b"data: [DONE]\n\n"
    first = shared.claim(run)
    client = asked(first, "POST", origin.url("/v1/chat/completions"), body=b"{}")
    upstream = origin.accept()
    upstream.head()
    upstream.exactly(2)
    upstream.send(EVENTS + chunk * 20)
    client.head()
    client.exactly(300_000)
    shared.end(first, "died")

    second = shared.claim(run)
    joined = asked(second, "POST", origin.url("/v1/chat/completions"), body=b"{}")
    joined.head()
    upstream.send(chunk * 20 + b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
    assert joined.body_until(None) == event * 40 + last
    shared.end(second, "died")

    third = asked(shared.claim(run), "POST", origin.url("/v1/chat/completions"), body=b"{}")
    assert b"Twiceshy-Replayed: true\r\n" in third.head()
    assert third.body_until(None) == event * 40 + last
    assert origin.nobody()


def test_a_large_answer_outlasts_a_database_that_is_away(hasty: Stack, run: str) -> None:
    hasty.mark()
    size = 5_000_000
    attempt = hasty.claim(run)
    attempt.ask("GET", hasty.url("/pantry"))
    tried = threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(hasty.dsn)
        try:
            async with connection.transaction():
                await connection.execute("LOCK TABLE twiceshy.body IN ACCESS EXCLUSIVE MODE")
                held.set()
                while "waits for Postgres" not in hasty.sidecar.log.read_text():
                    await asyncio.sleep(0.02)
                tried.set()
        finally:
            await connection.close()

    held = threading.Event()
    holder = threading.Thread(target=lambda: asyncio.run(hold()), daemon=True)
    holder.start()
    assert held.wait(PATIENCE)
    client = asking(attempt, "POST", hasty.url(f"/any/x?size={size}"))
    head = client.head()
    assert tried.wait(PATIENCE)
    holder.join(PATIENCE)
    assert digest(client, size) == expected(head, size)
    assert (size, True) in recorded(hasty, run)
    assert len(hasty.received("any")) == 1


def test_large_requests_do_not_stay_in_memory(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    body = bytes(8 * MB)
    attempt.ask("POST", shared.url("/any/warm"), body)
    memory = Memory(shared, run)
    for n in range(10):
        assert attempt.ask("POST", shared.url(f"/any/{n}"), body).status == 200
    memory.look()
    assert memory.most < 40 * MB  # the last one may still be about
