import http.client
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import Sandbox


@dataclass(frozen=True)
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks the sandbox directly, one connection per request unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def __call__(
        self,
        method: str,
        target: str,
        *,
        body: Any = None,
        form: dict[str, str] | None = None,
        key: str | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Got:
        headers = {} if key is None else {"Idempotency-Key": key}
        data: bytes | None = None
        if form is not None:
            data = urllib.parse.urlencode(form).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        elif isinstance(body, bytes):
            data = body
        elif body is not None:
            data = json.dumps(body).encode()
        used = connection or self.connect()
        try:
            used.request(method, target, data, headers)
            answer = used.getresponse()
            return Got(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            if connection is None:
                used.close()


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox.start(tmp_path / "sandbox.log") as running:
        yield running


@pytest.fixture
def ask(sandbox: Sandbox) -> Client:
    return Client(sandbox.port)
