"""The model behind the LLM endpoints: what it says is a function of what it was asked. Pure.

It can do the few tasks that the example agents set it (told by a phrase of the system prompt), reading the
first JSON object in the question. Given tools it calls those that the user names, one each turn, or the first
one; given a schema it answers what fits it. To everything else it answers two dozen words drawn by the hash of
the question. ``draw`` is which of several equal questions this one is: only questions with a temperature get
another answer each time.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, in no dialect."""

    model: str
    system: str
    turns: tuple[tuple[str, str], ...]  # role and text, the system's left out
    tools: tuple[Tool, ...] = ()
    called: int = 0  # how many calls have their results among the turns
    schema: Mapping[str, Any] | None = None  # what the answer must fit
    warm: bool = False  # it has a temperature
    stream: bool = False
    stream_usage: bool = False  # where a stream tells its usage only when asked to

    @property
    def said(self) -> str:
        return "\n".join(f"{role}: {text}" for role, text in self.turns)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool called, its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, in no dialect: a text or a call. ``ident`` names it, ``asked`` and ``told`` count tokens."""

    ident: str
    model: str
    text: str
    call: Call | None
    asked: int
    told: int


def answer(question: Question, ident: str, draw: int = 0) -> Said:
    """What the model answers."""
    call = _call(question)
    text = "" if call is not None else _text(question, draw)
    asked = tokens(question.system) + tokens(question.said)
    return Said(ident, question.model, text, call, asked, tokens(text if call is None else call.arguments))


def _call(question: Question) -> Call | None:
    user = " ".join(text for role, text in question.turns if role == "user")
    named = sorted((tool for tool in question.tools if tool.name in user), key=lambda tool: user.find(tool.name))
    due = (named or list(question.tools[:1]))[question.called :]
    if not due:
        return None
    return Call(due[0].name, json.dumps(_fit(due[0].schema, _first_object(user))))


def _text(question: Question, draw: int) -> str:
    if question.schema is not None and _task(question.system) is None:
        return json.dumps(_fit(question.schema, _first_object(question.said)))
    return reply(question.system, question.said, draw)


def _fit(schema: Mapping[str, Any], given: Any, root: Mapping[str, Any] | None = None) -> Any:
    """A value that fits *schema*: *given*, as far as it is there and is an object's field; else the plainest."""
    root = schema if root is None else root
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _fit(root.get("$defs", {}).get(name, {}), given, root)
    either = schema.get("anyOf") or schema.get("oneOf")
    if either:
        return _fit(either[0], given, root)
    kind = str(schema.get("type", "object" if "properties" in schema else "string")).lower()
    if kind == "object":
        known = given if isinstance(given, dict) else {}
        return {name: _fit(each, known.get(name), root) for name, each in schema.get("properties", {}).items()}
    if given is not None:
        return given
    if "enum" in schema:
        return schema["enum"][0]
    plain = {"integer": 1, "number": 1.5, "boolean": True, "null": None}
    return [_fit(schema.get("items", {}), None, root)] if kind == "array" else plain.get(kind, "lantern")


# ---- tasks


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


def _research(data: dict[str, Any]) -> str:
    topic = data.get("topic", "nothing")
    return json.dumps({"queries": [f"{topic} {aspect}" for aspect in ("history", "in numbers", "criticism")]})


def _sum_up(data: dict[str, Any]) -> str:
    findings = data.get("findings", [])
    told = " ".join(f"{each['title']} ({each['url']})." for each in findings)
    return f"On {data.get('topic', 'nothing')} there are {len(findings)} findings. {told} More is not known."


_TASKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "plan meals": _plan,
    "choose products": _choose,
    "tell the household": _tell,
    "triage refund requests": _triage,
    "draft letters to customers": _draft,
    "plan research": _research,
    "sum up findings": _sum_up,
}


def reply(system: str, question: str, draw: int = 0) -> str:
    """What the model says to *question*."""
    task = _task(system)
    if task is not None:
        return task(_first_object(question))
    dice = hashlib.sha512(f"{system}\n{question}\n{draw}".encode("utf-8", "surrogatepass")).digest()
    return " ".join(_WORDS[byte % len(_WORDS)] for byte in dice[:24]).capitalize() + "."


def _task(system: str) -> Callable[[dict[str, Any]], str] | None:
    return next((task for phrase, task in _TASKS.items() if phrase in system), None)


def _first_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def embedding(text: str, size: int = 8) -> list[float]:
    """*text* as a vector of length one, or nearly."""
    dice = hashlib.sha512(text.encode("utf-8", "surrogatepass")).digest()
    numbers = [byte - 127.5 for byte in dice[:size]]
    length = sum(number * number for number in numbers) ** 0.5
    return [round(number / length, 6) for number in numbers]


def tokens(text: str) -> int:
    """How many tokens *text* counts: its words."""
    return len(text.split())


def chunks(text: str, words: int = 3) -> list[str]:
    """*text* in pieces of so many words, as a stream gives them."""
    parts = text.split(" ")
    spaced = [part if index == 0 else f" {part}" for index, part in enumerate(parts)]
    return ["".join(spaced[start : start + words]) for start in range(0, len(spaced), words)]
