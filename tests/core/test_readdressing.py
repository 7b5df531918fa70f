"""Answers of MCP given to another request: its id and progress token, and every other byte as it was."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy import jsonrpc
from proxy.jsonrpc import KIND_WITHIN, NAME_MAX
from proxy.mcp import Names, Text
from proxy.sse import Events
from tests.core.messages import (
    EXCHANGE,
    PLACE,
    cuts,
    each_byte,
    led,
    many,
    one,
    replayed,
    responses,
    scalars,
    streams,
    text,
)

Make = Callable[[], Text | Events]


@given(responses(), scalars, scalars, cuts)
def test_a_response_gets_the_id_of_the_new_request_and_nothing_else(
    message: bytes, old: bytes, new: bytes, at: tuple[int, ...]
) -> None:
    sent = message.replace(PLACE, old)
    expected = sent if jsonrpc.same(old, new) else message.replace(PLACE, new)
    assert led(text(one(new)), sent, at) == expected


@given(streams(), scalars, scalars, cuts, st.booleans())
def test_a_stream_gets_the_names_of_the_new_request(
    stream: list[tuple[str, bytes]], old: bytes, new: bytes, at: tuple[int, ...], live: bool
) -> None:
    sent = b"".join(event.replace(PLACE, old) for _, event in stream)
    name = old if jsonrpc.same(old, new) else new
    expected = b"".join(event.replace(PLACE, name) for kind, event in stream if live or kind != "request")
    through = Events(Names(one(new, new), None), lambda _: not live)
    assert led(through, sent, at) == expected


@given(st.lists(responses(), min_size=1, max_size=4), cuts)
def test_the_ids_of_a_batch_change_by_the_requests_that_had_them(messages: list[bytes], at: tuple[int, ...]) -> None:
    count = len(messages)
    olds, news = [b"%d" % n for n in range(count)], [b'"new%d"' % n for n in range(count)]
    order = list(range(count))[::-1]

    def batch(names: list[bytes]) -> bytes:
        return b"[" + b" , ".join(messages[n].replace(PLACE, names[n]) for n in order) + b"]"

    assert led(text(many(*news), many(*olds)), batch(olds), at) == batch(news)
    event = b"data: " + batch(olds).replace(b"\n", b" ") + b"\n\n"
    assert led(replayed(many(*news), many(*olds)), event, at) == event.replace(
        batch(olds).replace(b"\n", b" "), batch(news).replace(b"\n", b" ")
    )


_bits = [b'{"id":', b"7", b'"', b"\\", b"}", b"]", b"[", b"{", b",", b":", b'"method":"', b'"result":', b"null", b" "]
_lines = [b"data: ", b"\n", b"\r", b"\r\n", b"\n\n", b"\xff", b"\x00", "é".encode(), b'"params":{', b'"progressToken":']
_soup = st.lists(st.sampled_from(_bits + _lines) | st.binary(max_size=4), max_size=30).map(b"".join)


@given(_soup, cuts)
@example(b'data: {"id": "a\ndata: b"}\n\n', ())
@example(b'{"id":7', ())
def test_however_it_is_cut_it_is_the_same_and_nothing_is_lost(soup: bytes, at: tuple[int, ...]) -> None:
    makes: list[Make] = [
        lambda: text(one(b'"n"', b'"t"')),
        lambda: replayed(one(b'"n"', b'"t"')),
        lambda: Events(Names(one(b'"n"'), None, EXCHANGE)),
    ]
    for make in makes:
        assert led(make(), soup, at) == each_byte(make(), soup) == led(make(), soup)
    assert led(Events(), soup, at) == soup
    assert led(Text(lambda name: name.raw), soup, at) == soup


# ---- one by one


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        (b'{"id":"7","result":1}', b'{"id":7,"result":1}'),
        (b'{"id":null,"error":{}}', b'{"id":null,"error":{}}'),  # the server could not read which one it answers
        (b'{"id":3,"id":4,"result":1}', b'{"id":7,"id":7,"result":1}'),
        (b'{"id":[3],"result":1}', b'{"id":[3],"result":1}'),
        (b'{"id":3}', b'{"id":3}'),
        (b'{"result":{"id":3}}', b'{"result":{"id":3}}'),
        (b'"id"', b'"id"'),
        (b'{"id":3,"result":1}{"id":3,"result":1}', b'{"id":7,"result":1}{"id":3,"result":1}'),
        (b'{"id":"' + b"x" * NAME_MAX + b'","result":1}', b'{"id":"' + b"x" * NAME_MAX + b'","result":1}'),
        (b'\xef\xbb\xbf{"id":3,"result":1}', b'\xef\xbb\xbf{"id":3,"result":1}'),
    ],
)
def test_odd_ones(sent: bytes, given: bytes) -> None:
    assert led(text(one()), sent) == given
    assert each_byte(text(one()), sent) == given


def test_a_large_answer_goes_on_while_it_comes() -> None:
    block = b"x\\n" * (100 << 10)
    through = text(one())
    assert through.feed(b'{"result":{"text":"') == b'{"result":{"text":"'
    for _ in range(3):
        assert through.feed(block) == block
    assert through.feed(b'"},"id":3') == b'"},"id":'
    assert through.feed(b"}") == b"7}"
    first = b'data: {"jsonrpc":"2.0","id":3,"result":{"text":"'
    events = replayed(one())
    assert events.feed(first) == first.replace(b"3,", b"7,")
    assert events.feed(block) == block


def test_what_a_long_message_is_must_show_in_time() -> None:
    long = b'"x":"' + b"x" * KIND_WITHIN + b'",'
    late = b'{"id":3,' + long + b'"result":1}'
    assert led(text(one()), late) == each_byte_of_few(text(one()), late) == late
    asks = b'data: {"method":"elicitation/create","params":{' + long[:-1] + b'},"id":3}\n\n'
    assert led(replayed(one()), asks) == asks
    comment = b":" + b"x" * KIND_WITHIN + b"\n"
    request = comment + b'data: {"id":1,"method":"roots/list"}\n\n'
    assert led(replayed(one()), request) == each_byte_of_few(replayed(one()), request) == request


def each_byte_of_few(through: Text | Events, data: bytes) -> bytes:
    return led(through, data, tuple(range(0, len(data), 4099)))


def test_a_batch_whose_ids_say_nothing_stays_as_it_is() -> None:
    sent = b'[{"id":1,"result":1},{"id":2,"result":2}]'
    for old in (None, many(b"1", b"1"), many(b"1"), many(b"5", b"6")):
        assert led(text(many(b"8", b"9"), old), sent) == sent
    assert led(text(many(b"8", b"9"), many(b"1", b"2")), sent) == sent.replace(b":1,", b":8,").replace(b":2,", b":9,")
    note = b'data: {"method":"notifications/progress","params":{"progressToken":"b"}}\n\n'
    old, new = many(b"1", b"2", tokens=(b'"a"', b'"b"')), many(b"8", b"9", tokens=(b"80", b"90"))
    assert led(replayed(new, old), note) == note.replace(b'"b"', b"90")


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    through = Events(Names(one(), None))
    asks = b'event: message\ndata: {"method":"elicitation/create","id":0,"params":{}}\n\n'
    assert through.feed(asks) == asks
    told = b'data: {"method":"notifications/progress","params":{"progressToken":5}}\r\r'
    assert through.feed(told) == told.replace(b"5", b"70")
    assert through.feed(b"\n: ping\n\n") == b"\n: ping\n\n"


def test_an_events_last_line_feed_goes_where_the_event_went() -> None:
    asks = b'data: {"method":"elicitation/create","id":0}\r\n\r'
    through = replayed(one())
    assert through.feed(asks) == b""
    assert through.feed(b"\ndata: {}\n\n") == b"data: {}\n\n"
