"""What a launcher asks its attempt's sidecar, over HTTP as the agent does. Shell.

``http.client`` in a thread: one small question now and then, and no HTTP library to import at start.
"""

import asyncio
import base64
import http.client
import json
from dataclasses import dataclass
from typing import Any

ATTEMPT_URL = "http://twiceshy.internal/attempt"
#: The sidecar answers from memory; a loaded machine may still take a while.
ANSWER_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the sidecar knows of the attempt."""

    open: int  # exchanges that are still out
    unheard: frozenset[str] = frozenset()  # steps whose answer nobody heard, and which is not final
    idle: float = 0.0  # seconds since it was heard of; 0 while it waits for an answer


@dataclass(frozen=True, slots=True)
class Refused:
    """The attempt is not, or no longer, the sidecar's to serve. ``code`` as in Twiceshy-Error."""

    code: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nobody answered."""


async def ask(proxy: str, run: str, token: str) -> Told | Refused | Unreachable:
    """Ask about the attempt of *run* under *token*. Also makes the sidecar write its tape down."""
    return await asyncio.to_thread(_ask, proxy, run, token)


def _ask(proxy: str, run: str, token: str) -> Told | Refused | Unreachable:
    connection = http.client.HTTPConnection(proxy, timeout=ANSWER_WITHIN)
    credentials = base64.b64encode(f"{run}:{token}".encode()).decode()
    try:
        connection.request("GET", ATTEMPT_URL, headers={"Proxy-Authorization": f"Basic {credentials}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            return Refused(answer.headers.get("Twiceshy-Error", str(answer.status)))
        told: Any = json.loads(body)
        return Told(int(told["open"]), frozenset(map(str, told.get("unheard", ()))), float(told.get("idle", 0)))
    except (OSError, http.client.HTTPException):
        return Unreachable()
    except (ValueError, KeyError, TypeError):
        return Refused("unreadable")
    finally:
        connection.close()
