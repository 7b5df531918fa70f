"""Who works in a state folder: one lock file for each worker, held for as long as it lives.

A worker that is gone leaves its file behind, unlocked: that is how the others on this host know, at once, that it is
dead, and with it (guardian) its agents. Who has put its runs back removes the file.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from runtime.folder import Lock, make_folder


def enroll(folder: Path) -> tuple[str, Lock]:
    """A new worker's id, and its lock. Raises UsageError when there can be no such file."""
    crew = folder / "workers"
    make_folder(crew)
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    # It is there under its name only when it is held: one that is not is a dead worker's.
    lock = Lock(crew / f".{name}.new")
    if not lock.take():
        raise AssertionError(f"{lock.path} is new, and held by another")
    lock.path = lock.path.rename(crew / f"{name}.lock")
    return name, lock


def dead(folder: Path) -> Iterator[tuple[str, Path]]:
    """The ids of dead workers that were not removed yet, and their files."""
    for path in sorted((folder / "workers").glob("[!.]*.lock")):
        if not Lock(path).held():
            yield path.stem, path
