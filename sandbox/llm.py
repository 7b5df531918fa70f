"""LLM endpoints: OpenAI's chat completions, responses and embeddings, Anthropic's messages, Gemini's contents.

The answer's bytes are a function of the request's path and body (``sandbox.model``), the id included: two equal
requests get equal bytes, unless they ask for a temperature. Every request that is understood is one paid
model call, from its first token on.
"""

import base64
import hashlib
import json
import re
import struct
from typing import Any, Protocol

from sandbox import model
from sandbox.answer import EVENTS, Answer, of_json
from sandbox.dialects import anthropic, gemini, openai_chat, openai_responses
from sandbox.model import Question, Said
from sandbox.service import Service
from sandbox.wire import Asked


class Dialect(Protocol):
    """A module of ``sandbox.dialects``."""

    def read(self, body: dict[str, Any], path: str) -> Question: ...
    def plain(self, said: Said) -> dict[str, Any]: ...
    def events(self, said: Said, question: Question) -> tuple[bytes, ...]: ...
    def refusal(self, status: int, message: str) -> dict[str, Any]: ...


#: By path; the embeddings have no dialect, since no stream.
DIALECTS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile("/v1/chat/completions"), openai_chat),
    (re.compile("/v1/responses"), openai_responses),
    (re.compile("/v1/messages"), anthropic),
    (re.compile("/v1(?:beta)?/models/[^/:]+:(?:g|streamG)enerateContent"), gemini),
)
EMBEDDINGS = "/v1/embeddings"
#: What a question that is none makes the dialects raise.
NOT_UNDERSTOOD = (ValueError, TypeError, KeyError, AttributeError)


class Llm(Service):
    """``POST /v1/{chat/completions,responses,embeddings,messages}``, ``POST /v1*/models/NAME:…``."""

    name = "llm"

    def act(self, asked: Asked, number: int) -> Answer:
        dialect = next((each for path, each in DIALECTS if path.fullmatch(asked.path)), None)
        if asked.method == "POST" and asked.path == EMBEDDINGS:
            return self._embed(asked, number)
        if asked.method != "POST" or dialect is None:
            return of_json(404, openai_chat.refusal(404, f"no such thing: {asked.method} {asked.path}"))
        try:
            question = dialect.read(json.loads(asked.body), asked.path)
        except NOT_UNDERSTOOD as error:
            return of_json(400, dialect.refusal(400, f"not understood: {error!r}"))
        digest = hashlib.sha256(asked.body).hexdigest()
        draw = sum(made["sha256"] == digest for made in self.ledger.made(self.name)) if question.warm else 0
        ident = hashlib.sha256(f"{digest} {draw}".encode()).hexdigest()[:24]
        said = model.answer(question, ident, draw)
        self.ledger.effect(self.name, "completion", number, made=ident, model=said.model, tokens=said.asked + said.told)
        if not question.stream:
            return of_json(200, dialect.plain(said))
        headers = (("Cache-Control", "no-cache"),)
        return Answer(200, dialect.events(said, question), headers, EVENTS, "chunked", stream=True)

    def _embed(self, asked: Asked, number: int) -> Answer:
        try:
            body = json.loads(asked.body)
            name, given = str(body["model"]), body["input"]
            texts = [given] if isinstance(given, str) else list(map(str, given))
        except NOT_UNDERSTOOD as error:
            return of_json(400, openai_chat.refusal(400, f"not understood: {error!r}"))
        vectors: list[Any] = [model.embedding(text) for text in texts]
        if body.get("encoding_format") == "base64":  # what OpenAI's SDK asks for by default
            vectors = [base64.b64encode(struct.pack(f"<{len(each)}f", *each)).decode() for each in vectors]
        tokens = sum(map(model.tokens, texts))
        self.ledger.effect(self.name, "embedding", number, made=f"emb-{number}", model=name, tokens=tokens)
        data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return of_json(200, {"object": "list", "data": data, "model": name, "usage": usage})
