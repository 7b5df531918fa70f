"""The refund agent with a manager's approval, which kills itself, by chance, right after what it has done.

Only after what is new: whoever is given an answer of the journal has killed itself there before, or was spared.
"""

import os
import secrets
import signal
import time
import urllib.request
from typing import Any

from sandbox.agents import approved_refund as program


def _deadly(request: urllib.request.Request) -> Any:
    answer = urllib.request.urlopen(request)
    new = "Twiceshy-Replayed" not in answer.headers
    if request.get_method() == "POST" and new and secrets.randbelow(3) == 0:
        _die()
    return answer


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def refund(given: Any) -> Any:
    """Handle one ticket."""
    if os.environ.get("CHAOS"):
        vars(program)["urlopen"] = _deadly
    return program.approved_refund(given)
