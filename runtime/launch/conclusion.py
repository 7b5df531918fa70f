"""What the end of an attempt means for its run, written down: for ``twiceshy run`` and for workers alike. Shell."""

import random
from dataclasses import dataclass

from runtime import events, retry, runs
from runtime.launch.attempt import Ended, Why
from runtime.launch.patient import Patient
from runtime.settings import Settings
from runtime.step import RunStatus


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the run is now (None: another attempt has it, nothing was written), and what there is to say of it.

    ``pause``: seconds for which a run that is queued again is to be left alone.
    """

    status: RunStatus | None
    words: str = ""
    pause: float = 0.0


async def conclude(patient: Patient, settings: Settings, claim: runs.Claim, ended: Ended) -> Conclusion:
    """Write down how the attempt of *claim* ended."""
    code = None if ended.exit is None else ended.exit.code
    match ended.why:
        case Why.LOST | Why.EXITED if (over := await _ended_by_its_sidecar(patient, settings, claim)) is not None:
            return over
        case Why.LOST:
            return Conclusion(None, f"{ended.words}; this agent was ended")
        case Why.STOPPED:
            return await _end(patient, claim, "stopped", code)
        case Why.INTERRUPTED:
            return await _end(patient, claim, "interrupted", code)
        case Why.SIDECAR:
            words = f"{ended.words}; the agent is started again"
            return await _end(patient, claim, "handed_over", code, words)
        case Why.EXITED if code == 0:
            return await _end(patient, claim, "done", code)
        case Why.EXITED | Why.UNHEARD | Why.OVERDUE:
            assert ended.exit is not None
            died = ended.exit.code < 0
            words = ended.words or f"the agent {'was' if died else 'ended with'} {ended.exit.words}"
            return await failed(patient, settings, claim, "died" if died else "failed", code, words)


async def _ended_by_its_sidecar(patient: Patient, settings: Settings, claim: runs.Claim) -> Conclusion | None:
    """What is said of an attempt that its sidecar has ended already: a local step of it took too long, say."""
    last = await patient.ask(runs.last_attempt, claim.run_id)
    if last is None or last.n != claim.n or last.outcome != "failed":
        return None
    row = await patient.ask(runs.get_run, claim.run_id)
    pause = retry.backoff(claim.barren, random.random(), base=settings.backoff)
    return Conclusion(row.status, f"{row.error}; {_again(pause)}", pause)


async def failed(
    patient: Patient, settings: Settings, claim: runs.Claim, outcome: str, code: int | None, words: str
) -> Conclusion:
    """The agent died, or said that it failed: again, after a pause, unless it gets nowhere."""
    row = await patient.ask(runs.get_run, claim.run_id)
    last = await patient.ask(runs.last_attempt, claim.run_id)
    progress = last is not None and last.n == claim.n and row.newest > last.counter_at
    barren = retry.barren(claim.barren, outcome, progress=progress)
    if barren >= settings.max_attempts:
        return await _end(patient, claim, outcome, code, f"{gave_up(settings, barren)}; the last: {words}", final=True)
    pause = retry.backoff(barren - 1, random.random(), base=settings.backoff)
    return await _end(patient, claim, outcome, code, words, pause=pause)


async def give_up(patient: Patient, settings: Settings, claim: runs.Claim) -> Conclusion:
    """The attempts before this one got nowhere, and nobody was left to say so."""
    row = await patient.ask(runs.get_run, claim.run_id)
    last = f"; the last: {row.error}" if row.error else ""
    return await _end(patient, claim, "failed", None, gave_up(settings, claim.barren) + last, final=True)


def gave_up(settings: Settings, barren: int) -> str:
    """Why a run has failed."""
    attempts = "one attempt" if barren == 1 else f"{barren} attempts in a row"
    return f"{attempts} brought no new step (max_attempts = {settings.max_attempts})"


async def _end(
    patient: Patient, claim: runs.Claim, outcome: str, code: int | None, words: str = "", *,
    final: bool = False, pause: float | None = None,
) -> Conclusion:  # fmt: skip
    status = await patient.ask(
        runs.end_attempt, claim.run_id, runs.hash_token(claim.token), outcome, code,
        final=final, error=words if outcome in retry.FAILURES else None, pause=pause,
    )  # fmt: skip
    if status is None:
        return Conclusion(None, "another attempt has taken the run over")
    if status.ended:
        await patient.ask(events.wake)  # who waits for its end
    if status is RunStatus.QUEUED and pause is not None:
        words += f"; {_again(pause)}"
    return Conclusion(status, words, pause or 0.0)


def _again(pause: float) -> str:
    return f"again in {pause:.0f} s" if pause >= 1 else "again at once"
