"""What an exchange knows of the run that it is made for."""

from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from proxy.refusals import Refusal
from proxy.tape import Tape
from runtime.entries import AnswerRow, Fence, Fenced, Stopped
from runtime.step import State

if TYPE_CHECKING:
    from proxy.recorder import Exchange


class Owner(Protocol):
    """The run that an exchange belongs to, as the sidecar knows it: a ``proxy.run.Run``."""

    run_id: str
    uuid: UUID
    fence: Fence
    tape: Tape
    refusal: Refusal | None
    outdated: bool

    def refuse(self, refusal: Refusal) -> None: ...
    def outcome_refusal(self, outcome: Fenced | Stopped) -> Refusal: ...
    def settled(self, exchange: "Exchange", row: AnswerRow | None, state: State | None) -> None: ...
