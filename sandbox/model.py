"""The model behind the LLM endpoints: what it says is a function of what it was asked. Pure.

It can do the few tasks that the example agents set it (told by a phrase of the system prompt), reading the
first JSON object in the question. To everything else it answers two dozen words drawn by the hash of the
question. ``draw`` is which of several equal questions this one is: only questions with a temperature get
another answer each time.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

_WORDS = [
    "journal",
    "proxy",
    "agent",
    "step",
    "answer",
    "order",
    "refund",
    "letter",
    "kitchen",
    "market",
    "harbour",
    "winter",
    "paper",
    "copper",
    "quiet",
    "window",
    "garden",
    "bridge",
    "morning",
    "river",
    "signal",
    "cedar",
    "lantern",
    "orchard",
]


def _plan(data: dict[str, Any]) -> str:
    there = {each["item"]: each["grams"] for each in data.get("shelf", [])}
    wanted = {"rice": 300, "onions": 100, "mushrooms": 250, "butter": 50, "parmesan": 60}
    missing = {item: grams - there.get(item, 0) for item, grams in wanted.items() if grams > there.get(item, 0)}
    return json.dumps({"dish": "mushroom risotto", "missing": missing})


def _choose(data: dict[str, Any]) -> str:
    lines = []
    for item, grams in sorted(data.get("missing", {}).items()):
        packs = -(-grams // 250)
        lines.append({"item": item, "packs": packs, "cents": packs * (150 + hashlib.sha256(item.encode()).digest()[0])})
    return json.dumps({"lines": lines, "total": sum(line["cents"] for line in lines)})


def _tell(data: dict[str, Any]) -> str:
    return (
        f"Tonight we cook {data.get('dish', 'something')}. The order {data.get('order')} over "
        f"{data.get('total', 0) / 100:.2f} euros is on its way, and all that is missing comes with it. "
        "Please put the wine into the fridge."
    )


def _triage(data: dict[str, Any]) -> str:
    broken = [line for line in data.get("lines", []) if line.get("state") == "broken"]
    if not broken:
        return json.dumps({"decision": "refuse", "amount": 0, "reason": "nothing is broken"})
    amount = sum(line["price"] for line in broken)
    return json.dumps({"decision": "refund", "amount": amount, "reason": f"broken: {broken[0]['item']}"})


def _draft(data: dict[str, Any]) -> str:
    return (
        f"Dear customer, we are sorry that your order {data.get('order')} did not arrive as it should have. "
        f"We have refunded {data.get('amount', 0) / 100:.2f} euros to the card you paid with; the reference is "
        f"{data.get('refund')}. You need not send anything back. It takes up to five days until the amount "
        "shows on your statement. Thank you for telling us, and for your patience. Your shop"
    )


_TASKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "plan meals": _plan,
    "choose products": _choose,
    "tell the household": _tell,
    "triage refund requests": _triage,
    "draft letters to customers": _draft,
}


def reply(system: str, question: str, draw: int = 0) -> str:
    """What the model says to *question*."""
    for phrase, task in _TASKS.items():
        if phrase in system:
            return task(_first_object(question))
    dice = hashlib.sha512(f"{system}\n{question}\n{draw}".encode("utf-8", "surrogatepass")).digest()
    return " ".join(_WORDS[byte % len(_WORDS)] for byte in dice[:24]).capitalize() + "."


def _first_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def tokens(text: str) -> int:
    """How many tokens *text* counts: its words."""
    return len(text.split())


def chunks(text: str, words: int = 3) -> list[str]:
    """*text* in pieces of so many words, as a stream gives them."""
    parts = text.split(" ")
    spaced = [part if index == 0 else f" {part}" for index, part in enumerate(parts)]
    return ["".join(spaced[start : start + words]) for start in range(0, len(spaced), words)]
