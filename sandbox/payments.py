"""Payments, as Stripe does them: form bodies, and an Idempotency-Key that is honoured.

* The first request with a key makes the effect; every later one with the same key and body gets the first
  answer again with ``Idempotent-Replayed: true``.
* While the first is in progress: 409 ``idempotency_key_in_use``.
* The same key with another path or body: 400 ``idempotency_error``.
* Without a key every request is a new refund.
* Requests that fail validation leave nothing behind.
"""

import hashlib
from urllib.parse import parse_qsl

from sandbox.answer import Answer, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked

_KINDS = {
    "refunds": ("refund", "re", ("charge",)),
    "charges": ("charge", "ch", ("amount", "currency")),
    "payouts": ("payout", "po", ("amount", "currency")),
}


def _error(status: int, kind: str, message: str, code: str | None = None) -> Answer:
    return of_json(status, {"error": {"type": kind, "code": code, "message": message}})


def _print(asked: Asked) -> str:
    """What must be equal for one key: method, path and body."""
    return hashlib.sha256(f"{asked.method} {asked.path}\n".encode() + asked.body).hexdigest()


def _fields(form: dict[str, str]) -> dict[str, object]:
    """The fields of a form: ``metadata[order]`` stands in an object, an amount is a number."""
    fields: dict[str, object] = {}
    for name, value in form.items():
        outer, bracket, inner = name.partition("[")
        if bracket:
            within = fields.setdefault(outer, {})
            assert isinstance(within, dict)
            within[inner.removesuffix("]")] = value
        else:
            fields[name] = int(value) if name == "amount" and value.isdigit() else value
    return fields


class Payments(Service):
    """``POST /payments/v1/{refunds,charges,payouts}``, ``GET`` all of them or one; ``/payments`` may be left out."""

    name = "payments"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._in_progress: dict[str, int] = {}
        self._stored: dict[str, tuple[str, Answer]] = {}
        self._objects: list[tuple[str, dict[str, object]]] = []
        for made in ledger.made(self.name):
            facts = made["facts"]
            self._objects.append((facts["path"], facts["object"]))
            if made["key"]:
                self._stored[made["key"]] = (facts["print"], of_json(200, facts["object"]))

    def admit(self, asked: Asked, number: int) -> Answer | None:
        key = asked.header("idempotency-key")
        if asked.method != "POST" or key is None:
            return None
        if len(key) > 255:
            return _error(400, "invalid_request_error", "Idempotency-Key is longer than 255 characters")
        if key in self._stored:
            stored, answer = self._stored[key]
            if stored != _print(asked):
                return _error(400, "idempotency_error", f"Key {key} was used with other parameters")
            return Answer(answer.status, answer.pieces, (*answer.headers, ("Idempotent-Replayed", "true")))
        if key in self._in_progress:
            return _error(409, "idempotency_error", f"Key {key} is in progress", "idempotency_key_in_use")
        self._in_progress[key] = number
        return None

    def leave(self, asked: Asked, number: int) -> None:
        key = asked.header("idempotency-key")
        if key is not None and self._in_progress.get(key) == number:
            del self._in_progress[key]

    def act(self, asked: Asked, number: int) -> Answer:
        kind, _, ident = asked.path.removeprefix("/payments").removeprefix("/v1/").partition("/")
        if kind not in _KINDS:
            return _error(404, "invalid_request_error", f"no such thing: {asked.path}")
        path = f"/payments/v1/{kind}"
        if asked.method == "GET":
            kept = [each for at, each in self._objects if at == path]
            if not ident:
                return of_json(200, {"object": "list", "data": kept, "has_more": False, "url": path})
            found = next((each for each in kept if each["id"] == ident), None)
            return of_json(200, found) if found else _error(404, "invalid_request_error", f"no such {kind}: {ident}")
        if asked.method != "POST" or ident:
            return _error(405, "invalid_request_error", f"{asked.method} is not allowed here")
        effect, prefix, wanted = _KINDS[kind]
        form = dict(parse_qsl(asked.body.decode("utf-8", "replace"), keep_blank_values=True))
        missing = [name for name in wanted if not form.get(name)]
        if missing:
            return _error(400, "invalid_request_error", f"Missing: {', '.join(missing)}", "parameter_missing")
        made: dict[str, object] = {
            "id": f"{prefix}_{1 + sum(at == path for at, _ in self._objects):04}",
            "object": effect,
            "status": "succeeded",
            **_fields(form),
        }
        self._objects.append((path, made))
        answer = of_json(200, made)
        key = asked.header("idempotency-key")
        if key is not None:
            self._stored[key] = (_print(asked), answer)
        self.ledger.effect(
            self.name, effect, number, made=str(made["id"]), key=key, path=path, print=_print(asked), object=made
        )
        return answer
