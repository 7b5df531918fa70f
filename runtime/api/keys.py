"""The API's keys. The database knows a key's hash; the key itself is in the state folder that it was made in.

::

    FOLDER/api.key       the key, for the command line and the client library of this user; mode 0600
    FOLDER/api.address   where the API of this folder listens: http://HOST:PORT
    FOLDER/api.lock      held by the process that api.address names
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from runtime.database import Connection, sql
from runtime.errors import UsageError
from runtime.runs import in_transaction

KEY = re.compile(r"ts-([0-9a-f]{16})-([A-Za-z0-9_-]{43})")
_NOBODY = bytes(32)


def key_file(folder: Path) -> Path:
    """Where the key of a state folder is."""
    return folder / "api.key"


def address_file(folder: Path) -> Path:
    """Where the address of a state folder's API is."""
    return folder / "api.address"


def read(path: Path) -> str | None:
    """What a file of one line says; None: it is not there, or says nothing."""
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@in_transaction
async def known(connection: Connection, key: str | None) -> bool:
    """Whether *key* is one of ours. Takes as long for a wrong one as for a right one."""
    found = KEY.fullmatch(key or "")
    identity, secret = found.groups() if found else ("", "")
    digest = await connection.fetchval(sql("api_key"), identity)
    return hmac.compare_digest(digest or _NOBODY, _digest(secret)) and digest is not None


@in_transaction
async def make(connection: Connection) -> str:
    """A new key. It is nowhere else."""
    identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    await connection.execute(sql("make_key"), identity, _digest(secret))
    return f"ts-{identity}-{secret}"


async def of_folder(connection: Connection, folder: Path) -> str:
    """The key in *folder*; made at the first start, or where the database does not know the one that is there.

    Of two processes that start at the same instant one writes the file, and the other reads it.
    """
    path = key_file(folder)
    key = read(path)
    if key is not None and await known(connection, key):
        return key
    made = await make(connection)
    draft = path.with_name(f"api.key.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(made + "\n")
        if key is not None:
            draft.replace(path)
        else:
            try:
                os.link(draft, path)
            except FileExistsError:
                await asyncio.sleep(0)
                return read(path) or made
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return made


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()
