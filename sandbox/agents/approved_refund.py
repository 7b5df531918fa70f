"""Refunds what was broken, if the manager agrees: two model calls, a refund, a note, a mail.

twiceshy start approved-refund --input '{"order": "A-1001"}'
"""

import json
import os
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import twiceshy

VERDICT = {
    "type": "object",
    "properties": {
        "decision": {"enum": ["refund", "refuse"]},
        "amount": {"type": "integer", "minimum": 0},
        "reason": {"type": "string"},
    },
    "required": ["decision", "amount", "reason"],
}


def call(path: str, body: Any = None, form: Any = None) -> Any:
    """One request to the shop; the answer's JSON."""
    data = urlencode(form).encode() if form else json.dumps(body).encode() if body else None
    kind = "application/x-www-form-urlencoded" if form else "application/json"
    with urlopen(Request(os.environ["SANDBOX_URL"] + path, data, {"Content-Type": kind})) as answer:
        return json.load(answer)


@twiceshy.agent
def approved_refund(given: Any) -> Any:
    """Handle the refund request for ``order``."""
    order = call(f"/orders/{given['order']}")
    triage = "You triage refund requests. Answer with JSON: decision, amount in cents, reason."
    verdict = twiceshy.llm(json.dumps(order), system=triage, schema=VERDICT)
    if verdict["decision"] == "refuse":
        return {"refused": verdict["reason"]}

    approval = twiceshy.wait_approval("refund", {"order": order["id"], **verdict})
    if not approval:
        return {"declined": approval.comment, "by": approval.by}

    refund = call("/payments/v1/refunds", form={"charge": order["charge"], "amount": verdict["amount"]})
    call("/crm/notes", {"order": order["id"], "text": f"refunded {refund['id']}, approved by {approval.by}"})
    facts = {"order": order["id"], "amount": verdict["amount"], "refund": refund["id"]}
    letter = twiceshy.llm(json.dumps(facts), system="You draft letters to customers. Be kind and short.")
    call("/email/send", {"to": order["customer"], "subject": f"Your order {order['id']}", "text": letter})
    return {"refund": refund["id"], "by": approval.by}


if __name__ == "__main__":
    approved_refund.main()
