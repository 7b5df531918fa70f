"""The refund agent as one writes it today: with OpenAI's SDK, Stripe's, and requests.

    export SANDBOX_URL=http://127.0.0.1:8900 OPENAI_BASE_URL=http://127.0.0.1:8900/v1 OPENAI_API_KEY=any
    python support.py A-1001

Looks at an order, asks a model what to do, refunds, notes it, writes to the customer. STRIPE_BASE_URL is where the
refund goes (default: SANDBOX_URL), MODEL which model is asked. A plain program, written as if nothing ever crashed.
"""

import json
import os
import sys
import time
from typing import Any

import requests
import stripe
from openai import OpenAI

SHOP = os.environ["SANDBOX_URL"]
MODEL = os.environ.get("MODEL", "gpt-sandbox")
TRIAGE = "You triage refund requests. Answer with JSON: decision (refund or refuse), amount in cents, reason."
DRAFT = "You draft letters to customers. Be kind and short."
VERDICT = {
    "type": "object",
    "properties": {
        "decision": {"type": "string", "enum": ["refund", "refuse"]},
        "amount": {"type": "integer"},
        "reason": {"type": "string"},
    },
    "required": ["decision", "amount", "reason"],
    "additionalProperties": False,
}

model = OpenAI()
bank = stripe.StripeClient(
    os.environ.get("STRIPE_API_KEY", "sk_test_sandbox"),
    base_addresses={"api": os.environ.get("STRIPE_BASE_URL", SHOP)},
)
shop = requests.Session()


def say(step: int, text: str) -> None:
    """Tell whoever watches how far we are."""
    print(f"{step} {text}", flush=True)
    number, _, flag = os.environ.get("AGENT_LINGER", "").partition(":")
    while number == str(step) and os.path.exists(flag):  # noqa: PTH110 - wait here, to be killed
        time.sleep(0.02)


def call(method: str, path: str, body: Any = None) -> Any:
    """One request to the shop; the answer's JSON."""
    answer = shop.request(method, SHOP + path, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def judge(order: Any) -> Any:
    """Ask the model what to do, and wait for the whole answer."""
    done = model.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": TRIAGE}, {"role": "user", "content": json.dumps(order)}],
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}},
    )
    return json.loads(done.choices[0].message.content or "")


def draft(facts: Any) -> str:
    """Ask the model for a letter, and show its words as they come."""
    words: list[str] = []
    chunks = model.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": DRAFT}, {"role": "user", "content": json.dumps(facts)}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.content:
                words.append(choice.delta.content)
                print("  …" + words[-1], flush=True)
    return "".join(words)


def main(order_id: str) -> None:
    """Handle one refund request."""
    order = call("GET", f"/orders/{order_id}")
    say(1, f"order {order_id}: {', '.join(line['item'] + ' ' + line['state'] for line in order['lines'])}")

    verdict = judge(order)
    say(2, f"triage: {verdict['decision']} {verdict['amount']} ({verdict['reason']})")
    if verdict["decision"] != "refund":
        return

    refund = bank.v1.refunds.create(
        {"charge": order["charge"], "amount": verdict["amount"], "metadata": {"order": order_id}}
    )
    say(3, f"refund {refund.id}: {refund.amount} {order['currency']}")

    note = call("POST", "/crm/notes", {"order": order_id, "text": f"refunded {refund.id}"})
    say(4, f"note {note['id']}")

    letter = draft({"order": order_id, "amount": verdict["amount"], "refund": refund.id})
    say(5, f"letter of {len(letter.split())} words")

    mail = {"to": order["customer"], "subject": f"Your order {order_id}", "text": letter}
    say(6, f"mail {call('POST', '/email/send', mail)['id']} to {order['customer']}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "A-1001")
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
