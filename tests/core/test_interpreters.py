"""Which interpreter runs a command, and how something else is run just so."""

import pytest

from runtime.launch.interpreters import Interpreter, interpreter, program

FILES = {
    "/bin/agent": "#!/venv/bin/python -Es",
    "/bin/agent3": "#!/usr/bin/env python3",
    "/bin/split": "#!/usr/bin/env -S node --use-openssl-ca --inspect",
    "/bin/twice": "#!/bin/agent",
    "/bin/shell": "#!/bin/sh",
    "/bin/loop": "#!/bin/loop",
    "/bin/odd": "#!'",
    "/bin/binary": "",
}


def found(command: str) -> Interpreter | None:
    def find(name: str) -> str | None:
        path = name if "/" in name else f"/bin/{name}"
        return path if path in FILES else None

    return interpreter(command.split(), find, lambda path: FILES[path])


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("python agent.py", "python", "python"),
        ("/venv/bin/python3.12 -I -m agent", "python", "/venv/bin/python3.12 -I"),
        ("pypy3 agent.py", "python", "pypy3"),
        ("node --inspect --use-openssl-ca -r ./x agent.js", "node", "node --use-openssl-ca"),
        ("node -r ./x agent.js", "node", "node"),
        ("env -u NODE_OPTIONS node agent.js", "node", "env -u NODE_OPTIONS node"),
        ("env -i PATH=/bin A=b env --unset=C python -S a.py", "python", "env -i PATH=/bin A=b env --unset=C python -S"),
        ("agent --flag", "python", "/venv/bin/python -Es"),
        ("env A=b agent", "python", "env A=b /venv/bin/python -Es"),
        ("agent3", "python", "/usr/bin/env python3"),
        ("split", "node", "/usr/bin/env node --use-openssl-ca"),
        ("twice", "python", "/venv/bin/python -Es"),
    ],
)
def test_it_is_found(command: str, kind: str, words: str) -> None:
    assert found(command) == Interpreter(kind, tuple(words.split()))


@pytest.mark.parametrize(
    "command",
    ["", "env", "env -u", "env -C / python a.py", "shell", "sh -c python", "loop", "odd", "binary", "/no/such", "-I"],
)
def test_it_is_none_that_is_known(command: str) -> None:
    assert found(command) is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python agent.py", "agent.py"),
        ("/venv/bin/python3.12 -m shop.agent --flag", "shop.agent"),
        ("node bin/agent.js", "agent.js"),
        ("bash ./agent.sh", "agent.sh"),
        ("env A=b python agent.py", "agent.py"),
        ("bin/agent --flag", "agent"),
        ("python -I agent.py", "python"),
        ("python -", "python"),
        ("python -m", "python"),
        ("sh -c true", "sh"),
        ("python agents/", "python"),
        ("env -C / agent", "env"),
        ("env", "env"),
    ],
)
def test_an_agent_is_called_as_its_program_not_as_what_runs_it(command: str, name: str) -> None:
    assert program(command.split()) == name
