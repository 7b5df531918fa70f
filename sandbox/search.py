"""A search engine: only read, never changes. What it finds is a function of what it is asked."""

from urllib.parse import parse_qs

from sandbox import model
from sandbox.answer import Answer, of_json
from sandbox.service import Service
from sandbox.wire import Asked

_FOUND = 3


class Search(Service):
    """``GET /search?q=WORDS``: three results, each with title, url and text."""

    name = "search"

    def act(self, asked: Asked, number: int) -> Answer:  # noqa: ARG002
        words = parse_qs(asked.query).get("q", [""])[0]
        if asked.method != "GET" or asked.path != "/search" or not words:
            return of_json(404, {"error": f"no such thing: {asked.method} {asked.target}"})
        texts = [model.reply("", f"{words} {place}") for place in range(_FOUND)]
        results = [
            {"title": " ".join(text.split()[:3]), "url": f"https://{text.split()[3]}.example.org", "text": text}
            for text in texts
        ]
        return of_json(200, {"q": words, "results": results})
