"""The sandbox's server: finds the service, lets the fault happen, keeps the log, delivers the answer.

Besides the services there is the control side, whose requests are not logged: ``POST /faults`` (one, or a
list), ``DELETE /faults``, ``POST /release``, ``GET /gates /counts /requests /effects /log``.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

from sandbox.answer import Answer, of_json
from sandbox.anything import Anything
from sandbox.faults import Fault, Faults, read_fault
from sandbox.forge import Forge
from sandbox.ledger import Ledger
from sandbox.llm import Llm
from sandbox.mcp import Mcp
from sandbox.messengers import SendGrid, Slack, Twilio
from sandbox.passed import Passed
from sandbox.payments import Payments
from sandbox.search import Search
from sandbox.service import Service
from sandbox.shop import Crm, Mail, Orders, Pantry
from sandbox.wire import Asked, Gone, Line

#: By the first part of the path, or by the first two.
SERVICES: dict[str, type[Service]] = {
    "payments": Payments,
    # For SDKs that take a host, and no path before their own.
    "v1/refunds": Payments,
    "v1/charges": Payments,
    "v1/payouts": Payments,
    "orders": Orders,
    "pantry": Pantry,
    "crm": Crm,
    "email": Mail,
    "search": Search,
    "v1": Llm,
    "v1beta": Llm,
    "slack": Slack,
    "twilio": Twilio,
    "sendgrid": SendGrid,
    "github": Forge,
    "mcp": Mcp,
    "any": Anything,
}
CONTROL = frozenset({"faults", "release", "gates", "counts", "requests", "effects", "log"})
NO_FAULT = Fault()


class _Dropped(Exception):
    """A fault ended the connection."""


class Server:
    """Serves every request of every connection. *passed*: names, and the servers that their requests go on to."""

    def __init__(self, log: Path, seed: int = 0, passed: Mapping[str, str] | None = None) -> None:
        self._log = log
        self.ledger = Ledger(log)
        self.faults = Faults(seed)
        made = {service: service(self.ledger) for service in SERVICES.values()}
        self._services = {part: made[service] for part, service in SERVICES.items()}
        self._services |= {name: Passed(self.ledger, name, url) for name, url in (passed or {}).items()}

    async def serve(self, asked: Asked, line: Line) -> bool:
        """Serve one request; True when the connection may be used again."""
        part, _, rest = asked.path.removeprefix("/").partition("/")
        if part in CONTROL:
            await line.send(_whole(self._control(part, asked)))
            return True
        service = self._services.get(f"{part}/{rest.partition('/')[0]}") or self._services.get(part)
        name = service.name if service is not None else "unknown"
        number = self.ledger.request(asked, name)
        before = line.sent
        status: int | None = None
        how = "gone"
        watch = asyncio.create_task(self._watch(line, number))
        try:
            if not asked.whole:
                raise Gone
            fault = self.faults.take(asked, name) or NO_FAULT
            answer = await self._answer(service, asked, number, fault, line)
            status = answer.status
            keep = (asked.header("connection") or "").lower() != "close" and answer.framing != "close"
            await self._deliver(answer, asked, number, fault, line, keep)
            how = "answered"
            return keep
        except _Dropped as dropped:
            how = str(dropped)
            return False
        finally:
            watch.cancel()
            self.ledger.end(number, how, status, line.sent - before)

    async def _watch(self, line: Line, number: int) -> None:
        """Note at once when the client goes, also while the service goes on working for it."""
        await line.gone.wait()
        self.ledger.gone(number)

    async def _answer(self, service: Service | None, asked: Asked, number: int, fault: Fault, line: Line) -> Answer:
        """Everything up to the answer's first byte. The service does not care whether its client is still there."""
        if service is None:
            return of_json(404, {"error": f"no such service: {asked.path}"})
        if (turned_away := service.admit(asked, number)) is not None:
            return turned_away
        try:
            if delay := self.faults.delay(fault):
                await asyncio.sleep(delay)
            if fault.hold_before:
                await self.faults.gates[fault.hold_before](None)
            if fault.drop == "before":
                self._drop(line, fault, "dropped")
            if fault.status is not None and not fault.after_effect:
                return _error(fault)
            answer = service.act(asked, number)
        finally:
            service.leave(asked, number)
        await self.ledger.sync()
        if fault.delay_after:
            await asyncio.sleep(fault.delay_after)
        if fault.hold and not await self.faults.gates[fault.hold](line.gone):
            raise Gone
        if fault.drop == "after":
            self._drop(line, fault, "dropped")
        return _error(fault) if fault.status is not None else answer

    async def _deliver(self, answer: Answer, asked: Asked, number: int, fault: Fault, line: Line, keep: bool) -> None:
        if fault.framing is not None:
            answer = replace(answer, framing=fault.framing)
        extra = (("Date", formatdate(usegmt=True)), ("Sandbox-Serial", str(number)))
        head = answer.head(extra=extra, keep=keep)
        if asked.method == "HEAD" or answer.status in (204, 304):
            await line.send(head)
            return
        if len(answer.pieces) == 1 and answer.later is None and fault is NO_FAULT:  # in one packet, as servers do
            await line.send(head + answer.frame(answer.pieces[0]) + answer.tail)
            return
        await line.send(head)
        cut = None
        if fault.drop == "mid":
            whole = len(answer.pieces) if answer.stream else sum(map(len, answer.pieces))
            cut = whole // 2 if fault.cut_at is None else fault.cut_at
        passed = 0
        for index, piece in enumerate(answer.pieces):
            gate = fault.hold_events.get(index)
            if gate is not None and not await self.faults.gates[gate](line.gone):
                raise Gone
            if fault.pace and index:
                await asyncio.sleep(fault.pace)
            reach = index + 1 if answer.stream else passed + len(piece)
            if cut is not None and reach > cut:
                if not answer.stream and cut > passed:
                    await line.send(answer.frame(piece[: cut - passed]))
                break
            await line.send(answer.frame(piece))
            passed += len(piece)
        else:
            for piece in await self._later(answer, line):
                await line.send(answer.frame(piece))
            gate = fault.hold_events.get(len(answer.pieces))
            if gate is not None and not await self.faults.gates[gate](line.gone):
                raise Gone
        if answer.tail and (cut is None or fault.clean):
            await line.send(answer.tail)
        if cut is not None:
            self._drop(line, fault, "cut")

    async def _later(self, answer: Answer, line: Line) -> Sequence[bytes]:
        if answer.later is None:
            return ()
        pieces = asyncio.ensure_future(answer.later)
        gone = asyncio.ensure_future(line.gone.wait())
        await asyncio.wait((pieces, gone), return_when=asyncio.FIRST_COMPLETED)
        if not pieces.done():
            raise Gone
        gone.cancel()
        await self.ledger.sync()
        return pieces.result()

    def _drop(self, line: Line, fault: Fault, how: str) -> None:
        line.close(reset=fault.reset)
        raise _Dropped(how)

    def _control(self, part: str, asked: Asked) -> Answer:
        try:
            data = json.loads(asked.body) if asked.body else None
            return of_json(200, self._command(asked.method, part, data))
        except (ValueError, TypeError, KeyError) as error:
            return of_json(400, {"error": f"{error}"})

    def _command(self, method: str, part: str, data: Any) -> Any:
        match method, part:
            case "POST", "faults":
                for fault in [read_fault(each) for each in (data if isinstance(data, list) else [data])]:
                    self.faults.add(fault)
                return {}
            case "DELETE", "faults":
                self.faults.clear()
                return {}
            case "POST", "release":
                if not self.faults.release(str(data["name"])):
                    raise ValueError(f"no gate {data['name']!r}")
                return {}
            case "GET", "gates":
                return {name: gate.waiting for name, gate in self.faults.gates.items()}
            case "GET", "counts":
                return self.ledger.counts()
            case "GET", "requests":
                return self.ledger.requests
            case "GET", "effects":
                return self.ledger.effects
            case "GET", "log":
                return {"file": str(self._log)}
        raise ValueError(f"no such thing: {method} /{part}")


def _error(fault: Fault) -> Answer:
    assert fault.status is not None
    body = fault.body if fault.body is not None else json.dumps({"error": {"message": f"sandbox says {fault.status}"}})
    return Answer(fault.status, (body.encode(),), tuple(fault.headers.items()))


def _whole(answer: Answer) -> bytes:
    return answer.head() + b"".join(answer.pieces)
