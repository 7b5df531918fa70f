"""Whole events pass at once, in whatever pieces they come; the terminal event never does."""

import json
import tracemalloc
import zlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import streams
from proxy.streams import Hold

SSE = b"text/event-stream; charset=utf-8"
LONG = "x" * 300


@dataclass(frozen=True)
class Sent:
    """An event as an upstream sends it: lines without their ends."""

    lines: tuple[str, ...]
    terminal: bool = False


def data(message: object, name: str = "", space: str = " ") -> tuple[str, ...]:
    text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    lines = [f"event:{space}{name}"] if name else []
    return (*lines, *(f"data:{space}{line}" for line in text.split("\n")))


def plain(*lines: str) -> Sent:
    return Sent(lines)


def last(lines: tuple[str, ...]) -> Sent:
    return Sent(lines, terminal=True)


COMMON = [
    plain(": keepalive"),
    plain(":"),
    plain(": [DONE]", ": message_stop", ":data: [DONE]"),
    plain("id: 1", "retry: 5"),
    plain("data"),
    plain("data: naïve – 日本語 😀"),
    plain(": first a comment", "data: {}", ": and one within"),
    plain(*data("{\n}")),
    plain("data: not json"),
    plain("event: ping", 'data: {"type": "ping"}'),
]
CHAT = [
    plain(*data({"choices": [{"delta": {"content": "[DONE]"}, "finish_reason": None}]})),
    plain(*data({"choices": [{"delta": {"content": "data: [DONE]\n\n" + LONG}, "finish_reason": None}]})),
    plain("data: [DONE] not yet"),
    plain("data: [DONE]", "data: [DONE]"),
    plain("event: [DONE]", "data: x"),
]
CHAT_ENDS = [last(("data: [DONE]",)), last(("data:[DONE]",)), last(("id: 5", "data: [DONE] "))]
RESPONSES = [
    plain(*data({"type": "response.output_text.delta", "delta": "response.completed"}, "response.output_text.delta")),
    plain(*data({"type": "response.created", "response": {"text": 'a "type": "response.completed"' + LONG}})),
    plain(*data({"delta": LONG + "response.failed", "type": "response.output_text.delta"}, "response.x")),
    plain(*data({"type": "response.completed.not"})),
    plain("data: [DONE]"),
]
RESPONSES_ENDS = [
    last(data({"type": "response.completed", "response": {"output": LONG}}, "response.completed")),
    last(data({"type": "response.failed", "response": {}}, space="")),
    last((*data({"type": "response.incomplete", "response": LONG}), "event: response.incomplete")),
    last(data({"response": LONG, "type": "response.completed"})),
]
ANTHROPIC = [
    plain(*data({"type": "content_block_delta", "delta": {"text": "message_stop"}}, "content_block_delta")),
    plain(*data({"type": "content_block_delta", "delta": {"text": '{"type": "message_stop"}' + LONG}})),
    plain(*data({"type": "error", "error": {"type": "overloaded_error"}}, "error")),
    plain(*data({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, "message_delta")),
]
ANTHROPIC_ENDS = [
    last(data({"type": "message_stop"}, "message_stop")),
    last(data({"type": "message_stop"})),
    last(data({"type": "message_stop", "more": LONG}, "message_stop", space="")),
]
GEMINI = [
    plain(*data({"candidates": [{"content": {"parts": [{"text": '"finishReason": "STOP"'}]}, "index": 0}]})),
    plain(*data({"candidates": [{"content": {"parts": [{"text": LONG}]}}], "usageMetadata": {"totalTokenCount": 5}})),
    plain(*data({"candidates": [{"finishReason": None}]})),
    plain(*data({"candidates": [{"content": {"functionCall": {"args": {"finishReason": "STOP"}}}}]})),
]
GEMINI_ENDS = [
    last(data({"candidates": [{"content": {"parts": [{"text": "é" + LONG}]}, "finishReason": "STOP", "index": 0}]})),
    last(data({"candidates": [{"finishReason": "SAFETY"}], "usageMetadata": {}})),
    last(data({"promptFeedback": {"blockReason": "SAFETY"}})),
]
KNOWN = {
    "openai_chat": (CHAT, CHAT_ENDS),
    "openai_responses": (RESPONSES, RESPONSES_ENDS),
    "anthropic": (ANTHROPIC, ANTHROPIC_ENDS),
    "gemini": (GEMINI, GEMINI_ENDS),
}


@st.composite
def sent_streams(draw: st.DrawFn) -> tuple[str, list[tuple[bytes, bool]]]:
    """A dialect, and its events as bytes; some after the terminal one, some streams without one."""
    dialect = draw(st.sampled_from(sorted(KNOWN)))
    others, ends = KNOWN[dialect]
    events = draw(st.lists(st.sampled_from([*COMMON, *others]), max_size=6))
    if draw(st.booleans()):
        events += [draw(st.sampled_from(ends)), *draw(st.lists(st.sampled_from([*COMMON, *others]), max_size=2))]
    sent = []
    for event in events:
        end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
        text = "".join(line + end for line in (*event.lines, ""))
        sent.append((text.encode() + draw(st.sampled_from([b"", end.encode()])), event.terminal))
    return dialect, sent


def pieces(draw: st.DataObject, whole: bytes) -> list[bytes]:
    size = draw.draw(st.sampled_from([1, 2, 7, 100, None]))
    if size is not None:
        return [whole[n : n + size] for n in range(0, len(whole), size)]
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@pytest.mark.parametrize("longest", [140, streams.EVENT_MAX])
@given(sent_streams(), st.data())
def test_events_pass_whole_and_at_once_and_the_terminal_one_does_not(
    longest: int, sent: tuple[str, list[tuple[bytes, bool]]], draw: st.DataObject
) -> None:
    dialect, events = sent
    bounds = [0]
    terminal: tuple[int, int] | None = None
    for text, ends in events:
        bounds.append(bounds[-1] + len(text))
        if ends:
            terminal = (bounds[-2], bounds[-2] + len(text.rstrip(b"\r\n")))
    limit = terminal[0] if terminal else bounds[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "EVENT_MAX", longest)
        hold = Hold(dialect, SSE)
        fed = passed = 0
        for chunk in pieces(draw, b"".join(text for text, _ in events)):
            before, passed = passed, hold.feed(chunk)
            fed += len(chunk)
            assert before <= passed <= min(fed, limit)
            assert passed >= max(bound for bound in bounds if bound <= min(fed, limit))
            if terminal is None or fed <= terminal[1] + 1:
                assert not hold.ended
        assert hold.ended == (terminal is not None)
        assert passed == limit
        assert hold.strict
        assert hold.close() == (terminal is not None)


@given(sent_streams(), st.data(), st.sampled_from([b"gzip", b"deflate", b"bare"]), st.booleans())
def test_a_compressed_stream_is_held_by_what_it_says(
    sent: tuple[str, list[tuple[bytes, bool]]], draw: st.DataObject, coding: bytes, flush: bool
) -> None:
    dialect, events = sent
    bits = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS, b"bare": -zlib.MAX_WBITS}[coding]
    deflater = zlib.compressobj(wbits=bits)
    whole, bounds = b"", [(0, 0)]  # compressed, plain
    limit = 0
    for text, terminal in events:
        whole += deflater.compress(text) + (deflater.flush(zlib.Z_SYNC_FLUSH) if flush else b"")
        if terminal:
            break
        limit += len(text)
        bounds.append((len(whole), limit))
    whole += deflater.flush()

    hold = Hold(dialect, SSE, b"deflate" if coding == b"bare" else coding)
    fed = 0
    for chunk in pieces(draw, whole):
        passed = hold.feed(chunk)
        fed += len(chunk)
        seen = len(zlib.decompressobj(bits).decompress(whole[:passed]))
        assert seen <= limit
        if flush:  # without, an event need not be decodable when its last byte was written
            assert seen >= max(plain for compressed, plain in bounds if compressed <= fed)
    assert hold.ended == any(terminal for _, terminal in events)
    assert passed == fed or hold.ended if events else True


def test_an_event_is_not_held_for_its_successor_in_one_byte_chunks() -> None:
    hold = Hold("openai_chat", SSE)
    event = 'data: {"choices": [{"delta": {"content": "é"}}]}\n\n'.encode()
    passed = [hold.feed(event[n : n + 1]) for n in range(len(event))]
    assert passed == [0] * (len(event) - 1) + [len(event)]


def test_gemini_ends_with_its_last_candidate() -> None:
    def chunk(*candidates: tuple[int, str | None]) -> bytes:
        said = [{"index": index, **({"finishReason": reason} if reason else {})} for index, reason in candidates]
        return b"data: " + json.dumps({"candidates": said}).encode() + b"\r\n\r\n"

    first, second, third = chunk((0, None), (1, None)), chunk((0, "STOP")), chunk((1, "MAX_TOKENS"))
    hold = Hold("gemini", SSE)
    assert hold.feed(first + second) == len(first + second)
    assert not hold.ended
    assert hold.feed(third) == len(first + second)
    assert hold.ended


@pytest.mark.parametrize(
    ("dialect", "text", "ended"),
    [
        ("openai_chat", b"data: {}\n\ndata: [DONE]", True),
        ("openai_chat", b"data: {}\n\ndata: [DONE]\n", True),
        ("openai_chat", b"data: {}\n\ndata: [DO", False),
        ("openai_chat", b"data: {}\n\n", False),
        ("openai_chat", b"", False),
        ("anthropic", b'event: message_stop\ndata: {"type":"message_stop"}', True),
        ("anthropic", b'event: message_stop\ndata: {"type":"message_', False),
        ("anthropic", b"event: message_stop\n", False),
        ("openai_responses", b'data: {"type":"response.completed","response":{}', False),
        ("gemini", b'data: {"candidates":[{"finishReason":"STOP"}]}', True),
    ],
)
def test_a_stream_that_closes_within_its_last_event(dialect: str, text: bytes, ended: bool) -> None:
    hold = Hold(dialect, SSE)
    hold.feed(text)
    assert not hold.ended
    assert hold.close() == ended


@pytest.mark.parametrize(
    ("dialect", "kind", "coding"),
    [
        (None, SSE, None),
        ("unheard_of", SSE, None),
        ("openai_chat", b"application/json", None),
        ("openai_chat", b"", None),
        ("openai_chat", SSE, b"br"),
        ("openai_chat", SSE, b"gzip, gzip"),
    ],
)
def test_anything_else_passes_as_it_comes(dialect: str | None, kind: bytes, coding: bytes | None) -> None:
    hold = Hold(dialect, kind, coding)
    assert [hold.feed(b"data: [DO"), hold.feed(b"NE]\n\n"), hold.feed(b"")] == [9, 14, 14]
    assert not hold.strict
    assert not hold.close()


@pytest.mark.parametrize(
    ("dialect", "head", "passes"),
    [
        ("openai_chat", b'data: {"b64": "', True),
        ("anthropic", b'event: content_block_delta\ndata: {"b64": "', True),
        ("openai_responses", b'event: response.completed\ndata: {"b64": "', False),
        ("openai_responses", b'data: {"b64": "', False),
        ("gemini", b'data: {"b64": "', False),
    ],
)
def test_a_huge_event_takes_little_memory(dialect: str, head: bytes, passes: bool) -> None:
    hold = Hold(dialect, SSE)
    before = hold.feed(b": hello\n\n")
    chunk = b"A" * 65_536
    tracemalloc.start()
    try:
        hold.feed(head)
        passed = [hold.feed(chunk) for _ in range(400)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
    whole = before + len(head) + 400 * len(chunk)
    assert passed[-1] == (whole if passes else before)
    ends = b"completed" in head
    assert hold.feed(b'"}\n\ndata: ') == (before if ends else whole + 4)
    assert hold.ended == ends


def test_broken_compression_is_no_end() -> None:
    hold = Hold("openai_chat", SSE, b"gzip")
    assert hold.feed(b"data: [DONE]\n\n") <= 2
    assert hold.strict
    assert not hold.close()
