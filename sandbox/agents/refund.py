"""A refund agent: looks at an order, asks a model what to do, refunds, notes it, writes to the customer.

    SANDBOX_URL=http://127.0.0.1:8900 python refund.py A-1001

A plain program, standard library only, written as if nothing ever crashed.
"""

import json
import os
import sys
import time
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

BASE = os.environ["SANDBOX_URL"]
TRIAGE = "You triage refund requests. Answer with JSON: decision, amount in cents, reason."
DRAFT = "You draft letters to customers. Be kind and short."


def call(method: str, path: str, *, body: Any = None, form: dict[str, str] | None = None) -> Any:
    """One request to the world; the open answer."""
    data, kind = None, "application/json"
    if form is not None:
        data, kind = urlencode(form).encode(), "application/x-www-form-urlencoded"
    elif body is not None:
        data = json.dumps(body).encode()
    return urlopen(Request(BASE + path, data, {"Content-Type": kind} if data else {}, method=method))


def say(step: int, text: str) -> None:
    """Tell whoever watches how far we are."""
    print(f"{step} {text}", flush=True)
    number, _, flag = os.environ.get("AGENT_LINGER", "").partition(":")
    while number == str(step) and os.path.exists(flag):  # noqa: PTH110 - wait here, to be killed
        time.sleep(0.02)


def ask(system: str, question: str) -> str:
    """Ask the model and wait for the whole answer."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    with call("POST", "/v1/chat/completions", body={"model": "gpt-sandbox", "messages": messages}) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def stream(system: str, question: str) -> str:
    """Ask the model and show its words as they come."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {
        "model": "gpt-sandbox",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    words: list[str] = []
    with call("POST", "/v1/chat/completions", body=body) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return "".join(words)
            for choice in json.loads(data)["choices"] if data else []:
                words.append(choice["delta"].get("content", ""))
                if words[-1]:
                    print("  …" + words[-1], flush=True)
    raise SystemExit("the model stopped in the middle of its answer")


def main(order_id: str) -> None:
    """Handle one refund request."""
    with call("GET", f"/orders/{order_id}") as answer:
        order = json.load(answer)
    say(1, f"order {order_id}: {', '.join(line['item'] + ' ' + line['state'] for line in order['lines'])}")

    verdict = json.loads(ask(TRIAGE, json.dumps(order)))
    say(2, f"triage: {verdict['decision']} {verdict['amount']} ({verdict['reason']})")
    if verdict["decision"] != "refund":
        return

    form = {"charge": order["charge"], "amount": str(verdict["amount"]), "metadata[order]": order_id}
    with call("POST", "/payments/v1/refunds", form=form) as answer:
        refund = json.load(answer)
    say(3, f"refund {refund['id']}: {refund['amount']} {order['currency']}")

    with call("POST", "/crm/notes", body={"order": order_id, "text": f"refunded {refund['id']}"}) as answer:
        note = json.load(answer)
    say(4, f"note {note['id']}")

    letter = stream(DRAFT, json.dumps({"order": order_id, "amount": verdict["amount"], "refund": refund["id"]}))
    say(5, f"letter of {len(letter.split())} words")

    mail = {"to": order["customer"], "subject": f"Your order {order_id}", "text": letter}
    with call("POST", "/email/send", body=mail) as answer:
        say(6, f"mail {json.load(answer)['id']} to {order['customer']}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "A-1001")
    except HTTPError as error:
        sys.exit(f"{error.url}: {error.code} {error.reason}")
