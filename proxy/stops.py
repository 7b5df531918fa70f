"""What a request of a run that may not act is told: the words of fences and stops. Pure."""

from proxy.refusals import Refusal
from proxy.tape import Step
from runtime.entries import Fenced, Stopped
from runtime.step import RunStatus

_STOPS = {RunStatus.AMBIGUOUS: "ambiguous", RunStatus.DIVERGED: "diverged", RunStatus.OVER_BUDGET: "over-budget"}


def continued(run_id: str, successor: str) -> Refusal:
    """The words for whoever has a run that went on as *successor*."""
    return Refusal(
        "continued", f"Run {run_id} is done: it goes on as run {successor}. This process should end.", run_id
    )


def refusal_of(run_id: str, outcome: Fenced | Stopped) -> Refusal:
    """The words for a request that the journal does not let act."""
    if isinstance(outcome, Fenced):
        if outcome.sidecar is not None:
            return Refusal(
                "sidecar-changed",
                f"This attempt of run {run_id} began with another sidecar process ({outcome.sidecar}) and ends "
                "with it. Start the agent again; its launcher does so by itself.",
                run_id,
            )
        return Refusal(
            "fenced",
            f"The token is not that of run {run_id}'s current attempt: another attempt took the run over, or the "
            "token was not made by twiceshy. Nothing was sent. This process should end.",
            run_id,
        )
    code = _STOPS.get(outcome.status)
    if code is not None:
        return Refusal(code, outcome.message or f"Run {run_id} is stopped.", run_id, outcome.step)
    if outcome.status is RunStatus.PARKED:
        return Refusal("parked", f"Run {run_id} is parked: it waits, and its agent is started again then.", run_id)
    if outcome.continued_as is not None:
        return continued(run_id, outcome.continued_as)
    return Refusal(
        "not-running",
        f"Run {run_id} is {outcome.status}, not running. Nothing was sent. `twiceshy show {run_id}` tells more.",
        run_id,
    )


def ambiguous_message(run_id: str, step: Step, what: str) -> str:
    """The words of an ambiguous stop."""
    return (
        f"Run {run_id} is stopped: nobody can say whether step {step.key} ({step.facts.shown}) "
        f"was done ({what}), and it must not be done twice. Look it up there, then: "
        f"twiceshy resolve {run_id} {step.key} assume_done, or send_again."
    )
