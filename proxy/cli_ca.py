"""``twiceshy ca``: the certificate that agents must trust, for those that are not started by twiceshy."""

import argparse
import os
import sys
from pathlib import Path

from proxy import authority
from runtime import folder as state
from runtime.errors import UsageError


def ca(arguments: argparse.Namespace) -> int:
    """Show where the certificate is, hand it out, or put a new one in its place."""
    folder = state.state_folder(os.environ.get("DATABASE_URL"))
    state.make_folder(folder)
    if arguments.rotate:
        _rotate(folder)
    path, fingerprint = authority.certificate(folder)
    if arguments.export == "-":
        sys.stdout.write(path.read_text("ascii"))
        return 0
    if arguments.export is not None:
        _export(path, Path(arguments.export))
        path = Path(arguments.export)
    print(path)
    print(f"SHA-256 {fingerprint}")
    return 0


def _export(certificate: Path, target: Path) -> None:
    """The certificate alone: the key never leaves its folder."""
    try:
        target.write_text(certificate.read_text("ascii"), "ascii")
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}") from error


def _rotate(folder: Path) -> None:
    """Only when nobody is served: agents that run would not trust the new one, and fail in the middle of their work."""
    lock = state.Lock(folder / "keeper.lock")
    if not lock.take():
        raise UsageError(
            f"a sidecar of {folder} is running (pid {lock.owner()}), and its agents trust the CA that there is: "
            "end them first"
        )
    try:
        authority.rotate(folder)
    finally:
        lock.release()
