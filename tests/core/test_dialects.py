"""What a stream says of itself: that it is whole without a terminal event, that it failed, how many tokens it took."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import dialects
from proxy.dialects import usage
from proxy.streams import Hold

SSE = b"text/event-stream; charset=utf-8"


def events(*messages: object) -> bytes:
    return b"".join(b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages) + b"data: [DONE]\n\n"


def chat(*choices: tuple[int, str | None], **more: object) -> bytes:
    said: list[dict[str, object]] = [{"index": n, "delta": {}, "finish_reason": reason} for n, reason in choices]
    return b"data: " + json.dumps({"choices": said, **more}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (chat((0, None)), False),
        (chat((0, None)) + chat((0, "stop")), True),
        (chat((0, "length")) + chat(usage={"total_tokens": 3}), True),
        (chat((0, None), (1, None)) + chat((0, "stop")), False),
        (chat((0, None), (1, None)) + chat((0, "stop")) + chat((1, "stop")), True),
        (chat((0, "stop")) + b'data: {"choices": [], "usa', False),
        (chat((0, None)) + chat((0, "stop")).rstrip(b"\n"), False),
        (chat(), False),
    ],
)
def test_a_chat_whose_server_says_no_done_is_whole_when_all_choices_are_finished(text: bytes, ended: bool) -> None:
    hold = Hold("openai_chat", SSE)
    assert hold.feed(text + b"\n") <= len(text) + 1
    assert not hold.ended
    assert hold.close() == ended


@pytest.mark.parametrize(
    ("dialect", "text", "failed"),
    [
        ("openai_chat", chat((0, None)) + b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n', True),
        ("openai_chat", chat((0, "error"), error={"code": 502}), True),
        ("openai_chat", chat((0, "error")), True),
        ("openai_chat", chat((0, "stop"), error=None) + b"data: [DONE]\n\n", False),
        ("openai_chat", chat((0, "content_filter")), False),
        ("openai_responses", events({"type": "error", "message": "x"}, {"type": "response.completed"}), True),
        ("openai_responses", events({"type": "response.failed", "response": {"error": {}}}), True),
        ("openai_responses", events({"type": "response.incomplete", "response": {}}), False),
        ("openai_responses", events({"type": "response.completed", "response": {"error": None}}), False),
        ("anthropic", b'event: error\ndata: {"error": {}}\n\n' + events({"type": "message_stop"}), True),
        ("anthropic", events({"type": "content_block_delta", "delta": {"text": "an error"}}), False),
        ("gemini", events({"error": {"code": 503}}, {"candidates": [{"finishReason": "STOP"}]}), True),
        ("gemini", events({"candidates": [{"finishReason": "SAFETY"}]}), False),
        (None, chat((0, "error")), False),
    ],
)
def test_an_error_inside_a_stream_is_seen(dialect: str | None, text: bytes, failed: bool) -> None:
    for coding, sent in ((None, text), (b"gzip", gzip.compress(text))):
        hold = Hold(dialect, SSE, coding)
        for n in range(0, len(sent), 7):
            hold.feed(sent[n : n + 7])
        hold.close()
        assert hold.failed == failed


# ---- tokens


ANTHROPIC_START = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1,
                   "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4}}}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "kind", "body", "tokens"),
    [
        ("openai_chat", b"application/json", b'{"usage": {"prompt_tokens": 3, "total_tokens": 7}}', 7),
        ("openai_chat", b"application/json", b'{"usage": {"prompt_tokens": 3, "completion_tokens": 5}}', 8),
        ("openai_chat", b"application/json", b'{"usage": null}', 0),
        ("openai_chat", b"application/json", b'{"usage": {"total_tokens": true}}', 0),
        ("openai_chat", b"application/json", b'{"usage": {"total_tokens": -5}}', 0),
        ("openai_chat", b"application/json", b'{"usage": {"total_tokens": 1e3}}', 0),
        ("openai_chat", b"application/json", b'{"usage": {"total_tokens": %d}}' % 10**40, dialects.USAGE_MAX),
        ("openai_chat", b"application/json", b'{"usage": {"total_tokens": %s}}' % (b"1" * 5000), 0),
        ("openai_chat", b"application/json", b'{"usage": [', 0),
        ("openai_chat", b"application/json", b'{"usage": ' + b"[" * 10**5, 0),
        ("openai_chat", b"application/json", b'"usage"', 0),
        ("openai_chat", SSE, events({"choices": [], "usage": None}, {"usage": {"total_tokens": 9}}), 9),
        (
            "openai_responses",
            SSE,
            events({"type": "response.completed", "response": {"usage": {"total_tokens": 6}}}),
            6,
        ),
        ("openai_responses", b"application/json", b'{"usage": {"input_tokens": 1, "output_tokens": 2}}', 3),
        ("anthropic", b"application/json", b'{"usage": {"input_tokens": 1, "output_tokens": 2}}', 3),
        (
            "anthropic",
            SSE,
            events(ANTHROPIC_START, {"usage": {"output_tokens": 20}}, {"usage": {"output_tokens": 30}}),
            47,
        ),
        (
            "gemini",
            SSE,
            events({"usageMetadata": {"totalTokenCount": 1}}, {"usageMetadata": {"totalTokenCount": 8}}),
            8,
        ),
        ("gemini", b"application/json", b'[{"usageMetadata": {"totalTokenCount": 1}}, {}]', 1),
        (None, b"application/json", b'{"usage": {"total_tokens": 7}}', 0),
        ("unheard_of", b"application/json", b'{"usage": {"total_tokens": 7}}', 0),
    ],
)
def test_tokens_are_counted_as_the_provider_says(dialect: str | None, kind: bytes, body: bytes, tokens: int) -> None:
    assert usage(dialect, kind, body) == tokens


def test_tokens_of_a_compressed_answer() -> None:
    body = b'{"usage": {"total_tokens": 7}}'
    assert usage("openai_chat", b"application/json", gzip.compress(body), b"gzip") == 7
    assert usage("openai_chat", b"application/json", body, b"gzip") == 0


@given(st.sampled_from([*dialects.DIALECTS, "x"]), st.sampled_from([SSE, b"application/json", b";"]), st.binary())
def test_counting_never_fails(dialect: str, kind: bytes, body: bytes) -> None:
    assert usage(dialect, kind, body) == 0
    assert usage(dialect, kind, b'"usage"' + body) == 0


@given(
    st.sampled_from(list(dialects.DIALECTS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["usage", "response", "total_tokens"]), inner),
    ),
)
def test_counting_takes_any_json(dialect: str, message: object) -> None:
    assert 0 <= usage(dialect, SSE, events({"usage": message})) <= dialects.USAGE_MAX
    assert (
        0
        <= usage(dialect, b"application/json", json.dumps([message, {"usage": message}]).encode())
        <= dialects.USAGE_MAX
    )
