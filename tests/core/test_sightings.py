"""Addresses out of the kernel's tables and strace's lines, and what such an address is."""

import ipaddress
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.launch.sightings import (
    Address,
    Allowed,
    Called,
    Kind,
    Socket,
    Trace,
    Transport,
    address,
    allowed,
    kind,
    table,
)

TCP, UDP = Transport.TCP, Transport.UDP
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"


def line(local: str, remote: str, state: str, inode: object) -> str:
    return f"   0: {local} {remote} {state} {REST} {inode} 1 00000000abfa2747 100 0 0 10 0\n"


@pytest.mark.skipif(sys.byteorder == "big", reason="the tables are written as they lie in memory: little endian here")
def test_a_table_of_the_kernel() -> None:
    text = HEAD + "".join(
        [
            line("00000000:1F90", "00000000:0000", "0A", 11),
            line("0100007F:C350", "0100007F:1538", "01", 12),
            line("0200A8C0:C351", "08080808:01BB", "02", 13),
            line("0200A8C0:C352", "08080808:01BB", "06", 0),  # nobody's any more
            line("0200A8C0:C353", "08080808:01BB", "01", 14),  # somebody else's
        ]
    )
    assert table(text, {11, 12, 13}) == [
        Socket(11, Address("0.0.0.0", 8080), None, listening=True),
        Socket(12, Address("127.0.0.1", 50000), Address("127.0.0.1", 5432), listening=False),
        Socket(13, Address("192.168.0.2", 50001), Address("8.8.8.8", 443), listening=False),
    ]


@pytest.mark.skipif(sys.byteorder == "big", reason="the tables are written as they lie in memory: little endian here")
def test_ipv6_and_ipv4_that_is_mapped_into_it() -> None:
    six = "B80D0120000000000000000001000000"
    mapped, loopback = "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"
    text = HEAD + "".join(
        line(f"{loopback}:0001", f"{remote}:01BB", "01", n) for n, remote in enumerate((six, mapped, loopback), 1)
    )
    found = [each.remote for each in table(text, {1, 2, 3})]
    assert found == [Address("2001:db8::1", 443), Address("127.0.0.1", 443), Address("::1", 443)]
    assert str(found[0]) == "[2001:db8::1]:443"
    assert [each is not None and each.loopback for each in found] == [False, True, True]


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", HEAD, HEAD + "0: 0100007F:1F90\n", HEAD + line("0100007F", "0100007F:0001", "01", 1),
        HEAD + line("0100007F:1F90", "XX00007F:0001", "01", 1), HEAD + line("01007F:1F90", "01007F:0001", "01", 1),
        HEAD + line("0100007F:1F90", "0100007F:0001", "01", "one"),
        HEAD + line("0100007F:1F90", "0100007F:FFFFF", "01", "1x"),
    ],
)  # fmt: skip
def test_a_line_that_is_none_is_left_out(text: str) -> None:
    assert table(text, {1}) == []


@given(st.text())
def test_no_text_is_the_end_of_it(text: str) -> None:
    table(text, {0, 1})
    trace = Trace()
    for each in text.splitlines():
        trace.read(each)


# ---- strace

V4 = '{sa_family=AF_INET, sin_port=htons(%d), sin_addr=inet_addr("%s")}'
V6 = (
    "{sa_family=AF_INET6, sin6_port=htons(%d), sin6_flowinfo=htonl(0), "
    'inet_pton(AF_INET6, "%s", &sin6_addr), sin6_scope_id=0}'
)


def read(*lines: str) -> list[Called]:
    trace = Trace()
    return [called for line in lines for called in trace.read(line)]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ("0", ""), ("-1 EINPROGRESS (Operation now in progress)", ""),
        ("-1 ECONNREFUSED (Connection refused)", "refused"),
        ("-1 ENETUNREACH (Network is unreachable)", "unreachable"), ("-1 EINTR (Interrupted system call)", ""),
    ],
)  # fmt: skip
def test_a_connection_and_how_it_went(result: str, outcome: str) -> None:
    to = V4 % (443, "192.0.2.7")
    assert read(f"77 connect(5<TCP:[6789]>, {to}, 16) = {result}") == [
        Called(77, TCP, Address("192.0.2.7", 443), outcome)
    ]
    assert read(f"77  connect(5, {to}, 16)   = {result}") == read(f"77 connect(5<TCP:[6789]>, {to}, 16) = {result}")


def test_ipv6_in_a_call() -> None:
    assert read(f"7 connect(4<TCPv6:[1]>, {V6 % (443, '2606:4700::1')}, 28) = 0") == [
        Called(7, TCP, Address("2606:4700::1", 443))
    ]
    assert read(f"7 connect(4<TCPv6:[1]>, {V6 % (80, '::ffff:10.0.0.1')}, 28) = 0") == [
        Called(7, TCP, Address("10.0.0.1", 80))
    ]
    assert read(f"7 connect(4<TCPv6:[1]>, {V6 % (80, '::')}, 28) = 0") == [Called(7, TCP, Address("127.0.0.1", 80))]


def test_a_call_that_another_one_came_between() -> None:
    to = V4 % (443, "192.0.2.7")
    assert read(
        f"77 connect(5<TCP:[1]>, {to}, 16 <unfinished ...>",
        f"78 connect(5<TCP:[2]>, {V4 % (80, '192.0.2.8')}, 16) = 0",
        "77 <... connect resumed>)              = -1 ECONNREFUSED (Connection refused)",
        "79 <... connect resumed>) = 0",
    ) == [Called(78, TCP, Address("192.0.2.8", 80)), Called(77, TCP, Address("192.0.2.7", 443), "refused")]


def test_a_second_call_for_the_same_connection_is_none() -> None:
    to = V4 % (443, "192.0.2.7")
    assert read(f"7 connect(5<TCP:[1]>, {to}, 16) = -1 EISCONN (Transport endpoint is already connected)") == []


def test_where_nothing_goes() -> None:
    assert read(
        '7 connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path="/run/nscd"}, 110) = -1 ENOENT (No such file)',
        "7 connect(3<TCP:[1]>, {sa_family=AF_UNSPEC}, 16) = 0",
        f"7 connect(3<TCP:[1]>, {V4 % (0, '192.0.2.7')}, 16) = 0",
        f"7 connect(3<TCP:[1]>, {V4 % (70000, '192.0.2.7')}, 16) = 0",
        f"7 connect(3<TCP:[1]>, {V4 % (1, '192.0.2.700')}, 16) = 0",
        "7 sendto(3<NETLINK:[ROUTE:7]>, [{nlmsg_len=20}], 20, 0, {sa_family=AF_NETLINK, nl_pid=0}, 12) = 20",
        '7 sendto(3<TCP:[10.0.0.1:5->192.0.2.7:443]>, "\\26"..., 517, 0, NULL, 0) = 517',
        "7 +++ exited with 0 +++",
        "strace: Process 7 attached",
    ) == []  # fmt: skip


def test_a_datagram_socket_connects_to_nobody_until_it_sends() -> None:
    to = V4 % (443, "192.0.2.7")
    connecting = f"7 connect(3<UDP:[1]>, {to}, 16) = 0"
    assert read(connecting) == []
    sent = [Called(7, UDP, Address("192.0.2.7", 443))]
    assert read(connecting, '7 sendto(3<UDP:[0.0.0.0:5]>, "x"..., 9, 0, NULL, 0) = 9') == sent
    assert read('7 sendto(3<UDP:[10.0.0.1:5->192.0.2.7:443]>, "x"..., 9, 0, NULL, 0) = 9') == sent
    assert read(f'7 sendto(3<UDP:[1]>, "x"..., 9, 0, {to}, 16) = 9') == sent
    assert read(f"7 sendmsg(3<UDP:[1]>, {{msg_name={to}, msg_namelen=16, msg_iov=[...]}}, 0) = 6") == sent
    assert read(f"7 sendmmsg(3<UDP:[1]>, [{{msg_hdr={{msg_name={to}, msg_namelen=16}}}}, ...], 2, 0) = 2") == sent
    six = "7 sendmmsg(3<UDPv6:[[::1]:5->[2001:db8::5]:53]>, [{msg_hdr={msg_name=NULL}}, ...], 2, MSG_NOSIGNAL) = 2"
    assert read(six) == [Called(7, UDP, Address("2001:db8::5", 53))]
    assert read('7 sendto(3<UDP:[0.0.0.0:5]>, "x"..., 9, 0, NULL, 0) = 9') == []


def test_a_connection_opened_by_its_first_bytes() -> None:
    to = V4 % (443, "192.0.2.7")
    assert read(f'7 sendto(3<TCP:[1]>, "x"..., 9, MSG_FASTOPEN, {to}, 16) = 9') == [
        Called(7, TCP, Address("192.0.2.7", 443))
    ]


def test_threads_and_programs() -> None:
    trace = Trace()
    flags = "flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD|CLONE_SYSVSEM"
    for each in (
        f"10 clone3({{{flags}, exit_signal=0}} <unfinished ...>",
        '11 execve("/usr/bin/odd", [...], 0x7ffc /* 38 vars */) = -1 ENOENT (No such file or directory)',
        "10 <... clone3 resumed> => {parent_tid=[11]}, 88) = 11",
        f"11 clone(child_stack=0x7f, {flags}, parent_tid=[12]) = 12",
        "12 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD, child_tidptr=0x7f) = 13",
        '13 execve("/usr/bin/a b\\"c", [...], 0x7ffc /* 38 vars */) = 0',
        "13 clone3({flags=CLONE_THREAD}, 88) = -1 EAGAIN (Resource temporarily unavailable)",
    ):
        assert trace.read(each) == []
    assert [trace.process(each) for each in (10, 11, 12, 13)] == [10, 10, 10, 13]
    assert trace.programs == {13: '/usr/bin/a b\\"c'}


def test_where_it_listens() -> None:
    trace = Trace()
    for each in (
        "7 listen(3<TCP:[127.0.0.1:33009]>, 128) = 0",
        "7 listen(4<TCPv6:[[::]:34987]>, 128)      = 0",
        "7 listen(5<TCP:[470507]>, 128) = 0",  # nobody knows where
        '7 listen(6<UNIX-STREAM:[1,"/run/x"]>, 128) = 0',
        "7 listen(7, 128) = 0",
    ):
        assert trace.read(each) == []
    assert trace.listeners == {Address("127.0.0.1", 33009), Address("::", 34987)}


# ---- what an address is

SIDECAR = Address("127.0.0.1", 7777)
OWN = Address("0.0.0.0", 8000)


def kind_of(host: str, port: int, transport: Transport = TCP, *permitted: Allowed) -> Kind | None:
    return kind(transport, address(host, port), sidecars={SIDECAR}, listeners={OWN}, permitted=permitted)


@pytest.mark.parametrize(
    ("host", "port", "transport", "expected"),
    [
        ("127.0.0.1", 7777, TCP, None),
        ("::ffff:127.0.0.1", 7777, TCP, None),
        ("127.0.0.1", 8000, TCP, None),  # what the process tree listens at
        ("192.0.2.7", 8000, TCP, Kind.PAST),  # elsewhere that port is somebody else's
        ("192.0.2.7", 443, TCP, Kind.PAST),
        ("2606:4700::1", 443, TCP, Kind.PAST),
        ("192.0.2.7", 443, UDP, Kind.QUIC),
        ("10.0.0.2", 53, UDP, Kind.LOOKUP),
        ("10.0.0.2", 53, TCP, Kind.LOOKUP),
        ("192.0.2.7", 123, UDP, Kind.DATAGRAM),
        ("127.0.0.1", 5432, TCP, Kind.SERVICE),
        ("::1", 6379, TCP, Kind.SERVICE),
        ("192.0.2.7", 5432, TCP, Kind.PAST),  # an effect there is journalled by nobody
        ("127.0.0.1", 25, TCP, Kind.PAST),  # mail is an effect
        ("127.0.0.1", 9999, TCP, Kind.PAST),  # not known: not trusted
    ],
)
def test_what_an_address_is(host: str, port: int, transport: Transport, expected: Kind | None) -> None:
    assert kind_of(host, port, transport) == expected


def test_what_was_said_to_be_well() -> None:
    network = Allowed(ipaddress.ip_network("10.0.0.0/8"), 5432)
    assert kind_of("10.1.2.3", 5432, TCP, network) is Kind.ALLOWED
    assert kind_of("10.1.2.3", 5433, TCP, network) is Kind.PAST
    assert kind_of("fd00::1", 5432, TCP, network) is Kind.PAST
    assert kind_of("192.0.2.7", 9999, TCP, Allowed(None, 9999)) is Kind.ALLOWED
    assert kind_of("192.0.2.7", 443, UDP, Allowed(ipaddress.ip_network("192.0.2.7"), None)) is Kind.ALLOWED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("db.internal:5432", ("db.internal", 5432)), ("db.internal", ("db.internal", None)), (":5432", ("", 5432)),
        ("[::1]:5432", ("::1", 5432)), ("[::1]", ("::1", None)), ("fd00::/8", ("fd00::/8", None)),
        ("10.0.0.0/8:80", ("10.0.0.0/8", 80)),
    ],
)  # fmt: skip
def test_addresses_as_people_write_them(text: str, expected: tuple[str, int | None]) -> None:
    assert allowed(text) == expected


@pytest.mark.parametrize("text", ["", ":", "a:b", "a:0", "a:65536", "[::1]5432", "[::1]:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        allowed(text)
