"""An assistant that runs for ever: answers each message by mail, and remembers what was said.

    twiceshy start assistant --run assistant-ada --input '{"to": "ada@example.org"}'
    twiceshy event assistant-ada message --payload '"When does the shop open?"'

Between two messages it holds no process. When its journal has grown long (1,000 steps by default) it goes on as a new
run, which is given what it remembers, and the messages that it has not read. They may still be sent to the first run.
"""

import json
import os
from typing import Any
from urllib.request import Request, urlopen

import twiceshy

#: How many messages and answers it remembers.
MEMORY = 20


def send(to: str, text: str) -> None:
    """Send a mail."""
    letter = json.dumps({"to": to, "subject": "Your assistant", "text": text}).encode()
    with urlopen(Request(os.environ["SANDBOX_URL"] + "/email/send", letter)):
        pass


@twiceshy.agent
def assistant(given: Any) -> None:
    """Answer every message ``to`` whom they are from."""
    memory = given.get("memory", [])
    while not twiceshy.should_continue_as_new():
        message = twiceshy.wait_event("message").payload
        memory = [*memory[-MEMORY:], {"role": "user", "content": message}]
        answer = twiceshy.llm(memory, system="You are a kind assistant. Be short.")
        memory.append({"role": "assistant", "content": answer})
        send(given["to"], answer)
    twiceshy.continue_as_new({**given, "memory": memory})


if __name__ == "__main__":
    assistant.main()
