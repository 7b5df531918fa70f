"""The wire forms of the LLM endpoints: each module reads one kind of question and writes one kind of answer.

Each has ``read(body, path)``, ``plain(said)``, ``events(said, question)`` and ``refusal(status, message)``. What
they write has the fields that the providers' SDKs look for, not all that a provider sends.
"""

from collections.abc import Mapping
from typing import Any

#: A fixed moment: answers hold no clock.
CREATED = 1_767_225_600


def text_of(content: Any) -> str:
    """A message's text: a string, or a list of parts of which some have one."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return str(content or "")


def schema_of(schema: Any) -> Mapping[str, Any]:
    """A JSON schema as it was given, an empty one for none."""
    return schema if isinstance(schema, dict) else {}
