"""Where an answer's body waits while it comes: in memory, and from a limit on in a file without a name."""

import os
import tempfile
from typing import IO


class Spool:
    """Bytes that grow at the end and are read anywhere. *limit*: bytes held in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self.size = 0

    def append(self, data: bytes) -> None:
        if self._file is None and self.size + len(data) > self._limit:
            self._file = tempfile.TemporaryFile(prefix="twiceshy-", buffering=0)  # noqa: SIM115 - closed by close()
            _write(self._file.fileno(), self._memory, 0)
            self._memory = bytearray()
        if self._file is None:
            self._memory += data
        else:
            _write(self._file.fileno(), data, self.size)
        self.size += len(data)

    def read(self, offset: int, count: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[offset : offset + count])
        return os.pread(self._file.fileno(), count, offset)

    def cut(self, size: int) -> None:
        """Forget everything from *size* on."""
        self.size = min(self.size, size)
        if self._file is None:
            del self._memory[self.size :]
        elif self.size <= self._limit:
            self._memory = bytearray(self.read(0, self.size))
            self.close()

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def close(self) -> None:
        """Give the file back. What was in it cannot be read any more."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write(file: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        offset, view = offset + count, view[count:]
