"""Takes any request, knows no keys, and counts: every request has an effect, a GET too.

``/any/PATH`` answers with the request's serial number, so that no two answers are equal.
``/any/PATH?size=N`` answers with N bytes in which every place differs.
"""

from collections.abc import Sequence
from typing import overload
from urllib.parse import parse_qs

from sandbox.answer import Answer, of_json
from sandbox.service import Service
from sandbox.wire import Asked

BLOCK = 64 << 10


class Pattern(Sequence[bytes]):
    """So many bytes in blocks, made when asked for: 200 MB of them cost no memory."""

    def __init__(self, size: int, salt: int) -> None:
        self._size = size
        self._salt = salt

    def __len__(self) -> int:
        return (self._size + BLOCK - 1) // BLOCK

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = (b"%010d %010d " % (self._salt, index)) * (BLOCK // 22 + 1)
        return block[: min(BLOCK, self._size - index * BLOCK)]


class Anything(Service):
    """Any method on ``/any/…``."""

    name = "any"

    def act(self, asked: Asked, number: int) -> Answer:
        self.ledger.effect(
            self.name, asked.method.lower(), number, made=str(number), key=asked.header("idempotency-key")
        )
        size = parse_qs(asked.query).get("size")
        if size is not None and size[0].isdigit():
            return Answer(200, Pattern(int(size[0]), number), type="application/octet-stream")
        return of_json(200, {"n": number, "method": asked.method, "target": asked.target, "size": len(asked.body)})
