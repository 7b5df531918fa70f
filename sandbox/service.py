"""What a stand-in service is."""

from sandbox.answer import Answer
from sandbox.ledger import Ledger
from sandbox.wire import Asked


class Service:
    """One service. Subclasses answer at once and in memory: what takes time are the faults around them."""

    name: str

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def admit(self, asked: Asked, number: int) -> Answer | None:  # noqa: ARG002
        """Look at a request before anything else happens to it. An answer turns it away."""
        return None

    def act(self, asked: Asked, number: int) -> Answer:
        """Make the effect, note it in the ledger, and say the answer."""
        raise NotImplementedError

    def leave(self, asked: Asked, number: int) -> None:
        """The request that was admitted is over, or has its effect."""
