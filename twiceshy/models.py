"""Model calls by OpenAI's interface, which most servers speak. Pure (``twiceshy.operation``).

A call is journalled as any request is: its answer is paid for once. Use whichever SDK you like; this is for the plain
case, a text or a value that fits a schema.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twiceshy import schemas, wire
from twiceshy.asking import dump, refused
from twiceshy.errors import STOPS, InvalidAnswer, Unreachable
from twiceshy.operation import Operation, Pause, Try

#: How often a call is tried that found the model busy, failing or not there.
TRIES = 4
#: The longest pause that a busy model may ask for, in seconds.
PAUSE_MAX = 60.0
_BUSY = frozenset({408, 409, 429})

Messages = Sequence[Mapping[str, Any]]


def llm(
    prompt: str | Messages,
    *,
    model: str | None = None,
    system: str | None = None,
    schema: Any = None,
    check: Callable[[Any], Any] | None = None,
    repairs: int = 1,
    base_url: str | None = None,
    api_key: str | None = None,
    **options: Any,
) -> Operation[Any]:
    """Ask a model; its text, or with *schema* (a pydantic model, a TypeAdapter, JSON Schema) the value.

    *check*: what makes the value of it, and raises ValueError where it does not fit. An answer that does not fit is
    shown to the model with what is wrong, *repairs* times; then InvalidAnswer is raised. *options* go into the request
    (temperature, max_tokens, …). ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``MODEL`` say what is not said here.
    """
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    name = model or os.environ.get("MODEL")
    if not name:
        raise ValueError("llm: which model? Give model=…, or set MODEL")
    base = (base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1").rstrip("/")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body: dict[str, Any] = {"model": name, **options}
    if schema is not None:
        shape = {"name": "answer", "schema": schemas.of(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": shape}
    for left in range(repairs, -1, -1):
        asked = dump({**body, "messages": messages}, "the request to the model")
        text = yield from _text(wire.Ask("POST", f"{base}/chat/completions", asked, headers))
        try:
            return _value(text, schema, check)
        except ValueError as error:
            problem = f"{error}"
            if not left:
                raise InvalidAnswer(text, problem) from error
        wrong = f"This answer does not fit: {problem}\nAnswer again, with what fits and nothing else."
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": wrong}]
    raise ValueError("repairs: 0 or more")


def _value(text: str, schema: Any, check: Callable[[Any], Any] | None) -> Any:
    value = text if schema is None else schemas.read(schema, text)
    return value if check is None else check(value)


def _text(what: wire.Ask) -> Operation[str]:
    """What the model says. A call that is tried again is the same step."""
    problem: str | BaseException = ""
    for again in range(TRIES):
        pause = 0.5 * 2**again
        try:
            reply: wire.Reply = yield Try(what, again)
        except (OSError, wire.Cut) as error:
            if "CERTIFICATE" in f"{error}":
                raise
            problem = Unreachable(f"{what.url}: {error}")
        else:
            if reply.status < 400:
                return _said(what, reply)
            problem = refused(reply)
            # What the sidecar itself says no to will not be another word the next time; an outage may.
            ours = reply.refusal is not None and reply.refusal not in {"upstream", "database-away"}
            if ours or reply.refusal in STOPS or not (reply.status in _BUSY or reply.status >= 500):
                raise problem
            pause = _asked_for(reply, pause)
        if again < TRIES - 1:
            yield Pause(min(pause, PAUSE_MAX))
    assert isinstance(problem, BaseException)
    raise problem


def _asked_for(reply: wire.Reply, otherwise: float) -> float:
    try:
        return max(float(reply.headers.get("retry-after", "")), 0.0)
    except ValueError:
        return otherwise


def _said(what: wire.Ask, reply: wire.Reply) -> str:
    try:
        message = reply.json()["choices"][0]["message"]
        text = message.get("content")
        if isinstance(text, str):
            return text
        raise InvalidAnswer(json.dumps(message), f"there is no text in it ({message.get('refusal') or 'tool calls?'})")
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidAnswer(reply.body[:2000].decode("utf-8", "replace"), f"{what.url}: {error!r}") from error
