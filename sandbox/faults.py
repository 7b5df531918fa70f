"""What goes wrong on demand. Pure but for the gates, which are asyncio events.

A fault names the requests it is for (``match``), which of them (``nth``: only that one, counted from 1;
else the first ``times``, 0 = every one), and what happens, in the order of a request's life:

    before the effect   delay, hold_before, status (an answer without the effect), drop = "before"
    the effect
    after it            delay_after, hold, status with after_effect, drop = "after"
    in the answer       framing, pace (seconds between pieces), hold_events (piece's index -> gate),
                        drop = "mid" (``cut_at``: before which piece of a stream, or at which byte of a body;
                        ``clean``: the framing says that this was all)

A *hold* is a gate by name: whoever comes to it waits until it is released. Each request takes at most one
fault, the first that is for it.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from sandbox.answer import Framing
from sandbox.wire import Asked


@dataclass(frozen=True, slots=True)
class Match:
    """Which requests; what is None matches all. ``path`` is a glob (``*`` takes slashes too)."""

    service: str | None = None
    method: str | None = None
    path: str | None = None
    query: str | None = None  # a piece of the query
    body: str | None = None  # a piece of the body
    header: tuple[str, str] | None = None  # name, and a piece of the value

    def __call__(self, asked: Asked, service: str) -> bool:
        if self.service not in (None, service) or self.method not in (None, asked.method):
            return False
        if self.path is not None and not fnmatchcase(asked.path, self.path):
            return False
        if self.query is not None and self.query not in asked.query:
            return False
        if self.body is not None and self.body.encode() not in asked.body:
            return False
        return self.header is None or self.header[1] in (asked.header(self.header[0]) or "")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong; the module says when."""

    match: Match = field(default_factory=Match)
    nth: int | None = None
    times: int = 1
    delay: float | tuple[float, float] = 0.0  # two numbers: by chance between them
    hold_before: str | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    after_effect: bool = False
    drop: Literal["before", "after", "mid"] | None = None
    reset: bool = False  # the drop is a TCP reset, not a close
    delay_after: float = 0.0
    hold: str | None = None
    framing: Framing | None = None
    pace: float = 0.0
    hold_events: Mapping[int, str] = field(default_factory=dict)
    cut_at: int | None = None
    clean: bool = False

    @property
    def gates(self) -> set[str]:
        return {name for name in (self.hold, self.hold_before, *self.hold_events.values()) if name}


def read_fault(data: Any) -> Fault:
    """A fault from JSON. Raises ValueError that names what is unknown."""
    if not isinstance(data, dict):
        raise ValueError("a fault is a JSON object")
    values = dict(data)
    match = values.get("match", {})
    for name, given, known in (("fault", values, Fault), ("match", match, Match)):
        unknown = set(given) - {each.name for each in fields(known)}
        if unknown:
            raise ValueError(f"{name}: unknown {', '.join(sorted(unknown))}")
    if "header" in match:
        match = {**match, "header": tuple(match["header"])}
    values["match"] = Match(**match)
    if isinstance(values.get("delay"), list):
        values["delay"] = tuple(values["delay"])
    values["hold_events"] = {int(index): str(name) for index, name in values.get("hold_events", {}).items()}
    if values.get("drop") not in (None, "before", "after", "mid"):
        raise ValueError("drop: before, after or mid")
    if values.get("framing") not in (None, "length", "chunked", "close"):
        raise ValueError("framing: length, chunked or close")
    return Fault(**values)


class Gate:
    """Where requests wait until somebody opens it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0

    async def __call__(self, gone: asyncio.Event | None) -> bool:
        """Wait until the gate opens, or the client has gone (if *gone* is given). False when it has gone."""
        self.waiting += 1
        try:
            waits = [asyncio.ensure_future(each.wait()) for each in (self.open, gone) if each is not None]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            return self.open.is_set()
        finally:
            self.waiting -= 1


class Faults:
    """The faults that are set, and the gates."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._set: list[tuple[Fault, list[int]]] = []
        self.gates: dict[str, Gate] = {}

    def add(self, fault: Fault) -> None:
        """Set *fault*; its gates are shut, also when they were opened before."""
        self._set.append((fault, [0]))
        for name in fault.gates:
            gate = self.gates.get(name)
            if gate is None or gate.open.is_set():
                self.gates[name] = Gate()

    def release(self, name: str) -> bool:
        """Open the gate *name* for all who wait and all who come; False if there is none."""
        gate = self.gates.get(name)
        if gate is not None:
            gate.open.set()
        return gate is not None

    def clear(self) -> None:
        """Forget every fault and open every gate."""
        self._set.clear()
        for gate in self.gates.values():
            gate.open.set()

    def take(self, asked: Asked, service: str) -> Fault | None:
        """The fault that this request takes."""
        taken: Fault | None = None
        for fault, seen in self._set:
            if not fault.match(asked, service):
                continue
            seen[0] += 1
            due = seen[0] == fault.nth if fault.nth is not None else fault.times == 0 or seen[0] <= fault.times
            if due and taken is None:
                taken = fault
        return taken

    def delay(self, fault: Fault) -> float:
        if isinstance(fault.delay, tuple):
            return self._chance.uniform(*fault.delay)
        return fault.delay
