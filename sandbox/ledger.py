"""The log: one JSON line per request, effect and end, append-only.

An effect is on the disk before its answer leaves, so that what the sandbox told somebody is never less
than what a test can read back. A server started on an existing log goes on where that ends.
"""

import asyncio
import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from sandbox.wire import Asked

#: Bodies beyond this stand in the log by their hash and their beginning.
BODY_MAX = 1 << 20

Record = dict[str, Any]


class Ledger:
    """Everything that was asked and everything that was done, in order."""

    def __init__(self, path: Path) -> None:
        self.requests: list[Record] = []
        self.effects: list[Record] = []
        self._by_number: dict[int, Record] = {}
        if path.exists():
            self._read(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._written = self._synced = 0
        self._lock = asyncio.Lock()

    def request(self, asked: Asked, service: str) -> int:
        """Note a request; its serial number."""
        number = len(self.requests) + 1
        record: Record = {
            "kind": "request",
            "n": number,
            "at": time.time(),
            "service": service,
            "method": asked.method,
            "target": asked.target,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in asked.headers],
            "body": base64.b64encode(asked.body[:BODY_MAX]).decode(),
            "size": len(asked.body),
            "sha256": hashlib.sha256(asked.body).hexdigest(),
            "whole": asked.whole,
            "connection": asked.connection,
            "turn": asked.turn,
        }
        self._write(record)
        return number

    def effect(
        self, service: str, effect: str, number: int, *, made: str, key: str | None = None, **facts: Any
    ) -> None:
        """Note that request *number* had an effect, which made the thing with the id *made*."""
        self._write(
            {
                "kind": "effect",
                "n": number,
                "at": time.time(),
                "service": service,
                "effect": effect,
                "id": made,
                "key": key,
                "sha256": self._by_number[number]["sha256"],
                "facts": facts,
            }
        )

    def gone(self, number: int) -> None:
        """Note that the client of request *number* went before its answer ended."""
        self._write({"kind": "gone", "n": number, "at": time.time()})

    def end(self, number: int, how: str, status: int | None, sent: int) -> None:
        """Note how request *number* ended: answered, dropped, cut or gone; and the bytes sent."""
        self._write({"kind": "end", "n": number, "at": time.time(), "how": how, "status": status, "sent": sent})

    def made(self, service: str) -> list[Record]:
        """The effects of one service, in order."""
        return [effect for effect in self.effects if effect["service"] == service]

    def counts(self) -> dict[str, dict[str, int]]:
        """Effects by service, requests by service."""
        counts: dict[str, dict[str, int]] = {"effects": {}, "requests": {}}
        for name, records in (("effects", self.effects), ("requests", self.requests)):
            for record in records:
                counts[name][record["service"]] = counts[name].get(record["service"], 0) + 1
        return counts

    async def sync(self) -> None:
        """Return when all that was written before the call is on the disk. Equal askers share one fsync."""
        written = self._written
        async with self._lock:
            if self._synced < written:
                mark = self._written
                await asyncio.get_running_loop().run_in_executor(None, os.fsync, self._file)
                self._synced = mark

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: Record) -> None:
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._written += 1
        self._take(record)

    def _take(self, record: Record) -> None:
        kind, number = record["kind"], record["n"]
        if kind == "request":
            self.requests.append(record)
            self._by_number[number] = record
        elif kind == "effect":
            self.effects.append(record)
        elif kind == "gone":
            self._by_number[number]["gone"] = record["at"]
        elif kind == "end":
            self._by_number[number]["end"] = record["how"]
            self._by_number[number] |= {"status": record["status"], "sent": record["sent"]}

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # the last writer died within a line: nobody was told of it
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            self._take(json.loads(line))
