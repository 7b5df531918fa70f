"""Which interpreter a command runs, and with which words it runs something else just so. Pure.

``env -u NAME python -I agent.py`` is tried as ``env -u NAME python -I -c …``: what keeps a program from the sidecar
keeps a probe from it too.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.launch.causes import python_flags

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*\Z")
_NODE = ("node", "nodejs")
_SHELLS = ("sh", "bash", "dash", "zsh")
#: Node's options that change how its clients reach others. Its others may load code of the program.
_NODE_KEPT = ("--use-", "--no-use-", "--tls-", "--http-proxy")
#: A script may be run by a script.
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Interpreter:
    """``kind``: python or node. ``words``: the beginning of a command that runs it, without a program."""

    kind: str
    words: tuple[str, ...]


def interpreter(
    command: Sequence[str], find: Callable[[str], str | None], first_line: Callable[[str], str], depth: int = _DEPTH
) -> Interpreter | None:
    """What *command* is run by; None: no interpreter that we know.

    *find*: the path of a command, as the shell looks for it. *first_line*: of the file at a path, empty if unknown.
    """
    before, rest = _environment(list(command))
    if not rest or not depth:
        return None
    name = rest[0].rpartition("/")[2]
    if _PYTHON.match(name):
        return Interpreter("python", (*before, rest[0], *python_flags(tuple(rest[1:]))))
    if name in _NODE:
        return Interpreter("node", (*before, rest[0], *_node_flags(rest[1:])))
    path = find(rest[0])
    line = first_line(path) if path is not None else ""
    if path is None or not line.startswith("#!"):
        return None
    try:
        words = shlex.split(line[2:])
    except ValueError:
        return None
    found = interpreter([*words, path, *rest[1:]], find, first_line, depth - 1)
    return None if found is None else Interpreter(found.kind, (*before, *found.words))


def program(command: Sequence[str]) -> str:
    """The name of the program that *command* runs, for people: ``agent.py`` where that is ``python agent.py``.

    Options in between may be of any kind: there, and where nothing else is certain, it is the command's own.
    """
    words = _environment(list(command))[1] or list(command)
    name = words[0].rpartition("/")[2]
    told = ""
    if _PYTHON.match(name) and words[1:2] == ["-m"]:
        told = words[2] if len(words) > 2 else ""
    elif (_PYTHON.match(name) or name in _NODE or name in _SHELLS) and len(words) > 1:
        told = words[1].rpartition("/")[2]
    return name if not told or told.startswith("-") else told


def _environment(words: list[str]) -> tuple[list[str], list[str]]:
    """The leading ``env …`` of *words*, and what it runs. Nothing to run: it is one that we cannot read."""
    before: list[str] = []
    while words and words[0].rpartition("/")[2] == "env":
        before.append(words.pop(0))
        while words:
            word = words[0]
            if word in ("-S", "--split-string"):  # as a script's first line has it: its words are split already
                words.pop(0)
                continue
            if word in ("-u", "--unset"):
                before += words[:2]
                words = words[2:]
            elif word in ("-", "-i", "--ignore-environment") or word.startswith(("-u", "--unset=")) or "=" in word:
                before.append(words.pop(0))
            elif word.startswith("-"):
                return [], []
            else:
                break
    return before, words


def _node_flags(words: Sequence[str]) -> list[str]:
    kept = []
    for word in words:
        if not word.startswith("-"):
            break
        if word.startswith(_NODE_KEPT):
            kept.append(word)
    return kept
