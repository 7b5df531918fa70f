"""Where an answer's body waits while it comes: in memory, and from a limit on in a file without a name."""

import tempfile
from typing import BinaryIO


class Spool:
    """Bytes that grow at the end and are read anywhere. *limit*: bytes held in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self.size = 0

    def append(self, data: bytes) -> None:
        self.size += len(data)
        if self._file is None:
            if self.size <= self._limit:
                self._memory += data
                return
            self._file = tempfile.TemporaryFile(prefix="twiceshy-")  # noqa: SIM115 - closed by close()
            self._file.write(self._memory)
            self._memory = bytearray()
        self._file.seek(0, 2)
        self._file.write(data)

    def read(self, offset: int, count: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[offset : offset + count])
        self._file.seek(offset)
        return self._file.read(count)

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
