"""A run's tape, read from the database. Shell; picture and words are ``runtime.tape``, ``runtime.summary``."""

from typing import Any

from runtime import runs, tape


async def read_tape(connection: Any, run_id: str) -> tape.Tape:
    """Everything that the picture and the summary of a run show. Raises NotFound."""
    row = await runs.get_run(connection, run_id)
    return tape.Tape(
        run=row.id,
        status=row.status,
        agent=row.agent,
        stop_step=row.stop_step,
        stop_message=row.stop_message,
        error=row.error,
        wake_at=row.wake_at,
        wake_on=row.wake_on or (),
        continued_as=row.continued_as,
        attempts=[
            tape.read_attempt(attempt.n, attempt.outcome, attempt.exit_code, attempt.tape)
            for attempt in await runs.attempts(connection, run_id)
        ],
        steps=[
            tape.StepLine(
                step.key, step.attempt, step.effect, step.state, step.method, step.url,
                statuses=tuple(step.statuses), finality=step.finality, evidence=step.evidence,
                kind=step.kind, subject=step.subject, deadline=step.deadline, error=step.error,
            )
            for step in await runs.steps(connection, run_id)
        ],
    )  # fmt: skip
