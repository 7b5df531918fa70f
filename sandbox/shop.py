"""The shop: pantry, orders, CRM notes, e-mail. Small, and each honest in its own way.

* pantry: only read, never changes.
* orders and CRM notes have a unique key column: a second request with the same ``Idempotency-Key`` gets
  the first row again with 200 instead of 201, whatever its body.
* e-mail knows no keys: every request is a letter that somebody gets.
"""

import hashlib
import json
from typing import Any

from sandbox.answer import Answer, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked

_SHELF = [
    {"item": "rice", "grams": 800},
    {"item": "onions", "grams": 300},
    {"item": "olive oil", "grams": 500},
    {"item": "parmesan", "grams": 20},
    {"item": "mushrooms", "grams": 0},
    {"item": "butter", "grams": 0},
]
_GOODS = [("olive oil", 1250), ("espresso cups", 2400), ("cast iron pan", 5900), ("tea pot", 3100)]
_CUSTOMERS = ["ada", "grace", "edsger", "barbara", "donald"]
_WAY = ["received", "picking", "packed", "shipped"]


def _json_body(asked: Asked) -> Any:
    try:
        return json.loads(asked.body)
    except ValueError:
        return None


def _not_found(asked: Asked) -> Answer:
    return of_json(404, {"error": f"no such thing: {asked.method} {asked.path}"})


class Pantry(Service):
    """``GET /pantry``: what is there."""

    name = "pantry"

    def act(self, asked: Asked, number: int) -> Answer:  # noqa: ARG002
        if asked.method not in ("GET", "HEAD") or asked.path != "/pantry":
            return _not_found(asked)
        return of_json(200, {"shelf": _SHELF})


class Table(Service):
    """Rows with a unique key: ``POST`` makes one, ``GET`` reads all or one."""

    path: str
    effect: str
    prefix: str

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._rows: list[dict[str, Any]] = []
        self._by_key: dict[str, dict[str, Any]] = {}
        for made in ledger.made(self.name):
            self._insert(made["facts"]["row"], made["key"])

    def act(self, asked: Asked, number: int) -> Answer:
        ident = asked.path.removeprefix(self.path).removeprefix("/")
        if asked.method == "GET":
            if not ident:
                return of_json(200, {"data": self._rows})
            row = self.row(ident)
            return of_json(200, row) if row is not None else _not_found(asked)
        if asked.method != "POST" or ident:
            return _not_found(asked)
        wanted = _json_body(asked)
        if not isinstance(wanted, dict) or not wanted:
            return of_json(422, {"error": "the body is not a JSON object"})
        key = asked.header("idempotency-key")
        if key is not None and key in self._by_key:
            return of_json(200, self._by_key[key])
        row = {**wanted, "id": f"{self.prefix}-{len(self._rows) + 1:04}"}
        self._insert(row, key)
        self.ledger.effect(self.name, self.effect, number, made=row["id"], key=key, row=row)
        return of_json(201, row)

    def row(self, ident: str) -> dict[str, Any] | None:
        return next((row for row in self._rows if row["id"] == ident), None)

    def _insert(self, row: dict[str, Any], key: str | None) -> None:
        self._rows.append(row)
        if key is not None:
            self._by_key[key] = row


class Orders(Table):
    """``POST /orders``; ``GET /orders``, ``/orders/ID``, ``/orders/ID/status``.

    Any id ``A-NUMBER`` is an order of old, which refunds are about. The status goes one on each time it is
    asked for: four equal requests with four different answers.
    """

    name = "orders"
    path = "/orders"
    effect = "order"
    prefix = "O"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._asked: dict[str, int] = {}

    def row(self, ident: str) -> dict[str, Any] | None:
        ident, _, part = ident.partition("/")
        row = _old_order(ident) if ident.startswith("A-") else super().row(ident)
        if row is None or part not in ("", "status"):
            return None
        if part == "status":
            turn = self._asked[ident] = self._asked.get(ident, 0) + 1
            return {"id": ident, "asked": turn, "status": _WAY[min(turn, len(_WAY)) - 1]}
        return row


class Crm(Table):
    """``POST /crm/notes``, ``GET /crm/notes``."""

    name = "crm"
    path = "/crm/notes"
    effect = "note"
    prefix = "N"


class Mail(Service):
    """``POST /email/send``, which ignores keys; ``GET /email/sent``."""

    name = "email"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._sent = [made["facts"]["mail"] for made in ledger.made(self.name)]

    def act(self, asked: Asked, number: int) -> Answer:
        if (asked.method, asked.path) == ("GET", "/email/sent"):
            return of_json(200, {"data": self._sent})
        if (asked.method, asked.path) != ("POST", "/email/send"):
            return _not_found(asked)
        letter = _json_body(asked)
        if not isinstance(letter, dict) or not letter.get("to"):
            return of_json(422, {"error": "to is missing"})
        mail = {**letter, "id": f"M-{len(self._sent) + 1:04}"}
        self._sent.append(mail)
        self.ledger.effect(self.name, "mail", number, made=mail["id"], mail=mail)
        return of_json(202, {"id": mail["id"], "status": "accepted"})


def _old_order(ident: str) -> dict[str, Any]:
    """An order that is a function of its id."""
    dice = hashlib.sha256(ident.encode()).digest()
    lines = [
        {"item": item, "price": price, "state": "broken" if index == dice[0] % 2 else "fine"}
        for index, (item, price) in enumerate(_GOODS[dice[1] % 3 :][:2])
    ]
    return {
        "id": ident,
        "customer": f"{_CUSTOMERS[dice[2] % len(_CUSTOMERS)]}@example.org",
        "charge": f"ch_{ident.removeprefix('A-')}",
        "currency": "eur",
        "lines": lines,
    }
