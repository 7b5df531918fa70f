"""Type errors on purpose: each line that says ``planted`` has to be reported under just that code.

They stand for what would blind the checker without a sound: strictness lost, our own packages or the
database driver turned into ``Any``, the pydantic plugin gone, ignores that ignore everything.
"""

import asyncpg

from proxy.message import Request
from runtime.entries import Fence
from runtime.settings import Settings
from runtime.step import State


def untyped(value):  # planted: no-untyped-def
    return value


def bare(values: list) -> int:  # planted: type-arg
    return len(values)


def fence() -> Fence:
    made = Fence(run_id=1, token_hash=b"", sidecar="")  # planted: arg-type
    made.sidecar = "another"  # planted: misc
    return made


def half_a_match(state: State) -> str:  # planted: return
    if state is State.SENT:
        return "sent"


def header(request: Request) -> bytes:
    return request.header("accept")  # planted: return-value


def settings() -> Settings:
    return Settings(leese=1.0)  # planted: call-arg


async def rows(connection: "asyncpg.Connection[asyncpg.Record]") -> str:
    connection.fetch("SELECT 1")  # planted: unused-coroutine
    found: str = await connection.fetch("SELECT 1")  # planted: assignment
    return found


def ignored() -> int:
    return "one"  # type: ignore  # planted: ignore-without-code
