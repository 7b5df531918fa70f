"""Which process is at the other end of a connection, and which group it is of."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from proxy import peers
from proxy.peers import Process
from tests.proxy.speakers import Script

CLIENT = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); sys.stdin.read()"

ways = pytest.mark.parametrize(
    ("bound", "called"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::ffff:127.0.0.1")]
)


@contextlib.contextmanager
def connected(bound: str, called: str) -> Iterator[tuple[int, socket.socket]]:
    """The pid of a client in a process group of its own, and its server's end of the connection."""
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    try:
        listener = socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")
    except OSError:
        pytest.skip(f"no {bound} here")
    with listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-ISc", CLIENT, called, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as client:
            listener.settimeout(30)
            accepted, _ = listener.accept()
            with accepted:
                yield client.pid, accepted
            client.kill()


def ends(accepted: socket.socket) -> tuple[Any, Any]:
    return accepted.getpeername()[:2], accepted.getsockname()[:2]


@ways
def test_the_process_at_the_other_end_is_found(bound: str, called: str) -> None:
    with connected(bound, called) as (pid, accepted):
        both = ends(accepted)
        found = peers.at(*both)
        assert found is not None
        assert (found.pid, found.group) == (pid, pid)
        assert peers.at(*both, (1, pid)) == found
        assert peers.alive(found)
        assert peers.group_alive(found)
    assert peers.at(*both) is None
    assert not peers.alive(found)
    assert not peers.group_alive(found)


@ways
def test_both_ways_to_ask_the_kernel_say_the_same(bound: str, called: str) -> None:
    with connected(bound, called) as (_, accepted):
        client, server = (peers._end(*end) for end in ends(accepted))
        inode = peers._listed(client, server)
        assert inode is not None
        with contextlib.suppress(PermissionError):  # where netlink is forbidden
            assert peers._asked(client, server) == inode
        for ask in (peers._asked, peers._listed):
            # Another host's client that has the same port; nobody's; the listener itself.
            other = peers._end("10.1.2.3", client[1])
            for nobody in ((other, server), (client, (server[0], 1)), (server, client), (server, server)):
                found = ask(*nobody)
                assert found != inode
                assert found is None or nobody == (server, client)


def test_a_group_is_known_by_its_first_process() -> None:
    with Script() as group:
        leader = peers.read(group.leader.pid)
        assert leader is not None
        member = subprocess.Popen(["sleep", "600"], process_group=leader.pid)
        try:
            first = peers.read(member.pid)
            assert first is not None
            assert peers.same_group(first, leader)
            assert {each.pid for each in peers.members(first)} == {leader.pid, member.pid}
            assert peers.name(first) == "sleep"
            # The number was another group's: its first process began before this one's leader.
            old = replace(first, pid=leader.pid + 1, started=leader.started - 1)
            assert not peers.same_group(old, leader)
            assert not peers.group_alive(old)
            # The leader is gone, and its group is not.
            group.end_leader()
            assert peers.same_group(first, first)
            assert peers.group_alive(first)
            assert not peers.same_group(replace(first, world="another/1"), first)
        finally:
            member.kill()
            member.wait()
        assert not peers.group_alive(first)


def test_a_zombie_does_not_live() -> None:
    process = subprocess.Popen(["true"], process_group=0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert peers.read(process.pid) is None
        os.killpg(process.pid, 0)  # its group is there still
        assert not peers.group_alive(Process(process.pid, process.pid, 1, peers.world()))
    finally:
        process.wait()


def test_a_process_is_written_and_read() -> None:
    me = peers.read(os.getpid())
    assert me is not None
    assert Process.parse(str(me)) == me
    for text in ("", "1:2:3", "a:1:2:world", "1:2:3:wo rld", "1:2:3:world\n"):
        assert Process.parse(text) is None
