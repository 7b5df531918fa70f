"""What events, their ids, approvals, agents and local steps may be called, and how urgent a run may be. Pure."""

import re

from runtime.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9._~-]{1,200}")
#: Keys of steps: what ``Twiceshy-Step`` may name, and what stands for a fingerprint and its occurrence (``…#1``).
STEP_KEY = re.compile(r"[A-Za-z0-9._~:/@+=,#-]{1,200}")
#: Priorities are whole numbers from minus this to this.
PRIORITY_MAX = 1_000_000


#: How long a word of a message may be, and a message.
WORD_MAX, MESSAGE_MAX = 300, 8000
_LONG = re.compile(rf"\S{{{WORD_MAX + 1},}}")


def readable(message: str) -> str:
    """*message* for people, cut where it repeats too much of what somebody else made up."""
    return shortened(_LONG.sub(lambda word: shortened(word[0]), message), MESSAGE_MAX)


def shortened(text: str, most: int = 200) -> str:
    """What of *text*, which somebody else made up, is repeated to him."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def check_name(what: str, name: str) -> str:
    """*name*, if *what* may be called so. Raises UsageError."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{what} {shortened(name)!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ ~ -")
    return name
