"""A grocery agent: looks into the pantry, lets a model plan and choose, orders, and tells the household.

    SANDBOX_URL=http://127.0.0.1:8900 python grocery.py

Six steps: three model calls, one order, one e-mail. A plain program, standard library only, written as if
nothing ever crashed.
"""

import json
import os
import sys
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BASE = os.environ["SANDBOX_URL"]


def call(method: str, path: str, body: Any = None) -> Any:
    """One request to the world; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    with urlopen(Request(BASE + path, data, headers, method=method)) as answer:
        return json.load(answer)


def ask(system: str, question: Any) -> str:
    """Ask the model."""
    messages = [{"role": "user", "content": json.dumps(question)}]
    body = {"model": "claude-sandbox", "max_tokens": 500, "system": system, "messages": messages}
    return str(call("POST", "/v1/messages", body)["content"][0]["text"])


def say(step: int, text: str) -> None:
    """Tell whoever watches how far we are."""
    print(f"{step} {text}", flush=True)
    number, _, flag = os.environ.get("AGENT_LINGER", "").partition(":")
    while number == str(step) and os.path.exists(flag):  # noqa: PTH110 - wait here, to be killed
        time.sleep(0.02)


def main() -> None:
    """Do the week's shopping."""
    pantry = call("GET", "/pantry")
    say(1, f"pantry: {len(pantry['shelf'])} things")

    plan = json.loads(ask("You plan meals. Answer with JSON: dish, missing.", pantry))
    say(2, f"plan: {plan['dish']}, missing {', '.join(plan['missing'])}")

    choice = json.loads(ask("You choose products. Answer with JSON: lines, total.", plan))
    say(3, f"choice: {len(choice['lines'])} products for {choice['total']} cents")

    order = call("POST", "/orders", {"lines": choice["lines"], "total": choice["total"]})
    say(4, f"order {order['id']}")

    text = ask("You tell the household what is for dinner.", {**plan, "order": order["id"], "total": order["total"]})
    say(5, f"letter of {len(text.split())} words")

    mail = call("POST", "/email/send", {"to": "home@example.org", "subject": "Dinner", "text": text})
    say(6, f"mail {mail['id']}")


if __name__ == "__main__":
    try:
        main()
    except HTTPError as error:
        sys.exit(f"{error.url}: {error.code} {error.reason}")
