"""Embeds documents, one after the other, and goes on where it was when it is started again.

    twiceshy start embedding --input '{"documents": ["…", "…"], "folder": "/data/vectors"}'

Heartbeats say how far it is. Where none comes for a minute the attempt is ended, and the next one goes on.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import twiceshy


def embed(text: str) -> list[float]:
    """*text* as a vector, by the model that is paid for it."""
    question = json.dumps({"model": "embed-sandbox", "input": text}).encode()
    where = os.environ["OPENAI_BASE_URL"] + "/embeddings"
    with urlopen(Request(where, question, {"Content-Type": "application/json"})) as answer:
        return list(json.load(answer)["data"][0]["embedding"])


@twiceshy.activity(heartbeat_timeout=60)
def embed_all(documents: list[str], folder: str) -> int:
    """Write a vector for each of *documents* into *folder*."""
    for n in range(twiceshy.progress(0), len(documents)):
        (Path(folder) / f"{n}.json").write_text(json.dumps(embed(documents[n])))
        twiceshy.heartbeat(n + 1)
    return len(documents)


@twiceshy.agent
def embedding(given: Any) -> Any:
    """Embed ``documents`` into ``folder``."""
    return {"embedded": embed_all(given["documents"], given["folder"])}


if __name__ == "__main__":
    embedding.main()
