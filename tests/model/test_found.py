"""What the model found, or thinking about it: each a plain test in the same world."""

import socket
from collections.abc import Iterator

import pytest

from runtime import runs
from tests.conftest import fresh_database
from tests.model.agents import Ask, Call
from tests.model.judge import Fate
from tests.model.promises import Promises
from tests.model.scene import Run, Scene
from tests.model.world import LEASE, World


@pytest.fixture(scope="module")
def world(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    for dsn in fresh_database(server, template):
        with World(dsn, tmp_path_factory.mktemp("found")) as made:
            yield made


class Slow:
    """An upstream to which a connection takes as long as the test wants: nobody else fits into its backlog."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listener.settimeout(20)
        self.port: int = self._listener.getsockname()[1]
        self._fillers: list[socket.socket] = []

    def fill(self) -> None:
        filler = socket.create_connection(("127.0.0.1", self.port))
        self._fillers.append(filler)

    def let_in(self) -> None:
        for filler in self._fillers:
            self._listener.accept()[0].close()
            filler.close()
        self._fillers.clear()

    def received(self) -> bytes:
        """What the next connection brings: a request's head, or nothing but its end."""
        with self._listener.accept()[0] as line:
            line.settimeout(20)
            data = b""
            while b"\r\n\r\n" not in data and (more := line.recv(4096)):
                data += more
            if data:
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return data

    def close(self) -> None:
        for sock in (*self._fillers, self._listener):
            sock.close()


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.close()


def asked(scene: Scene, run: Run, url: str) -> Call:
    attempt = run.current
    assert attempt is not None
    call = Call(1, attempt, 0, Ask("mail", "a"), again=False, tell=scene.world.tell)
    attempt.calls.append(call)
    scene.world.do(call.begin(url))
    return call


def test_who_was_believed_dead_does_not_send_what_he_had_in_hand(world: World, slow: Slow) -> None:
    """Not even when he has renewed his lease meanwhile: what he wrote down before it ended is in other hands."""
    scene, url = Scene(world), f"http://127.0.0.1:{slow.port}/mail"
    run, north = scene.begin(), world.sidecars["north"]
    world.sidecars["south"].start()  # it has to be there for as long as a lease to judge another one dead
    scene.claim(run, "north")
    north.arm("intent-written")
    asked(scene, run, url)
    assert world.wait(north.still)
    scene.time_passes(LEASE * 1.2)
    scene.claim(run, "south", by_clock=True)
    stopped = asked(scene, run, url)
    assert world.wait(lambda: stopped.refused == "ambiguous")
    [step] = world.fetch("SELECT key FROM twiceshy.step WHERE run_id = $1", run.id)
    world.verb(lambda connection: runs.resolve(connection, run.id, step["key"], "send_again"))
    scene.claim(run, "south")
    sent = asked(scene, run, url)
    assert slow.received().startswith(b"POST /mail")
    assert world.wait(lambda: sent.answered)
    slow.fill()
    north.resume()
    alive = "SELECT expires_at > twiceshy.now() AS alive FROM twiceshy.sidecar WHERE id = $1"
    assert world.wait(lambda: world.fetch(alive, north.id)[0]["alive"])
    slow.let_in()
    assert slow.received() == b""


def test_a_retry_of_what_was_never_understood_is_no_retry_of_an_earlier_call(world: World) -> None:
    """The first try was held while Postgres was away, and its client gave up: a step it had none."""
    scene, north = Scene(world), world.sidecars["north"]
    attempt = scene.claim(scene.begin(), "north")
    assert attempt is not None
    attempt.program += [Ask("call", "a"), Ask("call", "a")]
    scene.ask(attempt, 0)
    assert world.wait(scene.open)
    scene.decide(scene.open()[0], Fate.OK)
    world.run(north.gate.refuse)
    scene.time_passes(LEASE * 1.2)
    scene.hang_up(scene.ask(attempt, 1), reset=False)
    again = scene.ask(attempt, 1)
    assert again.again
    scene.database_returns()
    assert world.wait(lambda: len(scene.judge.log) == 2 or again.ending)
    assert [each.call for each in scene.judge.log] == [1, again.n]
    Promises(scene).hold()


def test_who_was_gone_before_his_answer_was_written_has_not_had_it(world: World) -> None:
    """The sidecar stood still while a client waited for a recorded answer, gave up, and tried again."""
    scene, north = Scene(world), world.sidecars["north"]
    run = scene.begin()
    first = scene.claim(run, "north")
    assert first is not None
    first.program += [Ask("call", "a"), Ask("mail", "a")]
    for place in (0, 1):
        scene.ask(first, place)
        assert world.wait(scene.open)
        scene.decide(scene.open()[0], Fate.OK)
    scene.end(first, "died")
    second = scene.claim(run, "north")
    assert second is not None
    scene.ask(second, 0)
    north.pause()
    scene.hang_up(scene.ask(second, 1), reset=False)
    again = scene.ask(second, 1)
    scene.resume(north)
    assert world.wait(lambda: again.ending or len(scene.judge.log) > 2)
    assert len(scene.judge.log) == 2
    assert again.answered
