"""What the library raises. Pure.

    SystemExit
      Stopped          this attempt is over: nothing it asks for is answered any more. Let it pass
        Parked         the run waits without a process; its agent is started again when it is due
        Continued      the run goes on as a new one (continue_as_new)
        Fenced         another attempt has taken over, or the run was cancelled or has ended
        Ambiguous      nobody knows whether a step was done; a person says so (twiceshy resolve)
        Diverged       the program walks another way than the one in its journal
        OverBudget     the run's budget is used up
    Exception
      Refused          twiceshy does not take this request; .code says why (docs/errors.md)
      NotUnderTwiceshy the program was started without twiceshy
      Unreachable      the sidecar, or the API, does not answer, or its database is away
      StepFailed       the function of a step failed; the same when it is replayed
      ChildFailed      a run that was waited for failed or was cancelled
      TimedOut         a wait came to its time limit (also a TimeoutError)
      InvalidAnswer    the model's answer does not fit, nor does the repaired one

``Stopped`` is a ``SystemExit`` so that ``except Exception`` does not swallow it and an agent that is parked ends
without a traceback. An agent that swallows it all the same gets it again with its next call, and its run is not done.
"""

from typing import Any

__all__ = [
    "Ambiguous",
    "ChildFailed",
    "Continued",
    "Diverged",
    "Fenced",
    "InvalidAnswer",
    "NotUnderTwiceshy",
    "OverBudget",
    "Parked",
    "Refused",
    "StepFailed",
    "Stopped",
    "TimedOut",
    "Unreachable",
]


class Stopped(SystemExit):
    """This attempt is over. ``message``: the sidecar's words. Uncaught, it ends the process."""

    #: What the process ends with. None: 1, and the message on standard error.
    exit_code: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message if self.exit_code is None else self.exit_code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Parked(Stopped):
    """The run waits, and holds no process meanwhile."""

    exit_code = 75  # EX_TEMPFAIL: try again later


class Continued(Stopped):
    """The run has ended and goes on as another one."""

    exit_code = 0


class Fenced(Stopped):
    """Another attempt has the run, or it has ended."""


class Ambiguous(Stopped):
    """The run stopped: it is not known whether a step was done that must not be done twice."""


class Diverged(Stopped):
    """The run stopped: what was asked for is not what was asked for before."""


class OverBudget(Stopped):
    """The run stopped: its budget is used up."""


class Refused(Exception):
    """twiceshy does not take a request. ``code``: as in docs/errors.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotUnderTwiceshy(RuntimeError):
    """There is no run to speak for."""


class Unreachable(Exception):
    """Nobody answers who could."""


class StepFailed(Exception):
    """The function of step ``name`` failed. ``error``: what is in the journal, as JSON."""

    def __init__(self, name: str, error: Any) -> None:
        known = isinstance(error, dict) and isinstance(error.get("message"), str)
        self.name = name
        self.error = error
        #: The name of the exception's class.
        self.type: str = str(error.get("type", "Error")) if known else "Error"
        super().__init__(f"step {name}: {self.type}: {error['message']}" if known else f"step {name}: {error}")


class ChildFailed(Exception):
    """Run ``run`` ended as ``status`` (failed, cancelled). ``error``: why."""

    def __init__(self, run: str, status: str, error: Any) -> None:
        super().__init__(f"run {run} is {status}" + ("" if error is None else f": {error}"))
        self.run = run
        self.status = status
        self.error = error


class TimedOut(TimeoutError):
    """What was waited for has not come in time."""


class InvalidAnswer(ValueError):
    """``text`` is what the model said last; ``problem`` is what is wrong with it."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"the model's answer does not fit: {problem}")
        self.text = text
        self.problem = problem


#: Code of a refusal that ends the attempt -> what is raised.
STOPS: dict[str, type[Stopped]] = {
    "parked": Parked,
    "continued": Continued,
    "fenced": Fenced,
    "sidecar-changed": Fenced,
    "not-running": Fenced,
    "ambiguous": Ambiguous,
    "diverged": Diverged,
    "over-budget": OverBudget,
}
