"""What these programs share: they say what they got, write a letter, and die where somebody wants that.

``DIES=1``: the n-th start dies by SIGKILL when it has said its n-th thing.
"""

import json
import os
import pathlib
import signal
import urllib.request

URL = os.environ["SANDBOX_URL"]
QUESTION = "Say in one sentence what is in the pantry."
_said = 0


def _start() -> int:
    with (pathlib.Path(os.environ["HERE"]) / "starts").open("ab") as file:
        file.write(b"x")
        return file.tell()


_turn = _start() if os.environ.get("DIES") else 0


def tell(what: object) -> None:
    global _said
    _said += 1
    print(_said, json.dumps(what), flush=True)
    if _said == _turn:
        os.kill(os.getpid(), signal.SIGKILL)


def mail(text: str) -> object:
    """Write a letter: an effect that nobody can take back."""
    body = json.dumps({"to": "ada@example.org", "subject": "pantry", "text": text}).encode()
    request = urllib.request.Request(URL + "/email/send", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
