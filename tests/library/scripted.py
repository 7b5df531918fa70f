"""A conversation with an operation: what it asks for, and what it is answered. No I/O."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from twiceshy.operation import Do, Never, Operation, Pause, Try
from twiceshy.wire import INTERNAL, Reply

T = TypeVar("T")


class Script:
    """Answers an operation's requests in order; keeps what was asked for."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, Any]] = []
        self.again: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.paused: list[float] = []

    def play(self, operation: Operation[T]) -> T:
        error: BaseException | None = None
        came: Any = None
        try:
            while True:
                due = operation.throw(error) if error is not None else operation.send(came)
                error, came = None, None
                try:
                    came = self._carry_out(due)
                except BaseException as raised:
                    error = raised
        except StopIteration as end:
            assert not self.answers, f"never asked for: {self.answers}"
            result: T = end.value
            return result

    def _carry_out(self, due: Try | Pause | Do | Never) -> Any:
        if isinstance(due, Pause):
            self.paused.append(due.seconds)
            return None
        if isinstance(due, Do):
            return due.work()
        assert isinstance(due, Try)
        body = None if due.ask.body is None else json.loads(due.ask.body)
        self.asked.append((due.ask.method, due.ask.url.removeprefix(INTERNAL), body))
        self.again.append(due.again)
        self.headers.append(dict(due.ask.headers))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok(body: Any = None, status: int = 200) -> Reply:
    return Reply(status, {}, b"" if status == 204 else json.dumps(body).encode())


def permit(**more: Any) -> Reply:
    return ok({"step": "k#0", "idempotency_key": "ik", "finish": f"{INTERNAL}/steps/k%230", **more}, 201)


def no(code: str, message: str = "because", status: int = 423) -> Reply:
    return Reply(status, {"twiceshy-error": code}, json.dumps({"detail": message}).encode())


def failing(error: Exception) -> Callable[..., Any]:
    def work(*_: Any) -> Any:
        raise error

    return work
