"""What a person decides of a whole run."""

from typing import Any

import pytest

from runtime import queue, runs, verbs
from runtime.entries import Fenced, Stopped
from runtime.errors import NotFound, NotNow
from runtime.step import RunStatus, State
from tests.database.samples import DOUBTFUL, PROVISIONAL, Scene

STOPPED = [RunStatus.AMBIGUOUS, RunStatus.DIVERGED, RunStatus.OVER_BUDGET]


async def put(scene: Scene, status: RunStatus) -> None:
    """Bring the run there, as what stops or ends it would."""
    message = "why" if status.stopped else None
    async with scene.journal.connection() as connection:
        await connection.execute(
            "UPDATE twiceshy.run SET status = $2, stop_message = $3, error = 'words' WHERE id = $1",
            scene.run_id, status, message,
        )  # fmt: skip


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.PARKED, *STOPPED])
async def test_whatever_has_not_ended_can_be_cancelled(scene: Scene, status: RunStatus) -> None:
    await scene.step()
    await put(scene, status)
    assert await scene.call(verbs.cancel) is status
    assert await scene.call(verbs.cancel) is RunStatus.CANCELLED
    row = await scene.call(runs.get_run)
    assert (row.status, row.stop_step, row.stop_message) == (RunStatus.CANCELLED, None, None)
    assert row.ended_at is not None
    # The attempt is refused, and its launcher hears why.
    assert await scene.write(scene.intent("new")) == Stopped(RunStatus.CANCELLED, None, None)
    assert not await scene.journal.put_result(scene.fence, b"1")
    assert await scene.call(runs.renew, scene.fence.token_hash, 30.0) is RunStatus.CANCELLED
    assert await scene.end("stopped", -15) is RunStatus.CANCELLED
    last = await scene.call(runs.last_attempt)
    assert last is not None
    assert last.outcome == "cancelled"
    assert (await scene.call(runs.get_run)).status is RunStatus.CANCELLED


@pytest.mark.parametrize("status", [RunStatus.DONE, RunStatus.FAILED])
async def test_what_has_ended_cannot(scene: Scene, status: RunStatus) -> None:
    await put(scene, status)
    with pytest.raises(NotNow, match=f"is {status} already"):
        await scene.call(verbs.cancel)
    with pytest.raises(NotFound):
        async with scene.journal.connection() as connection:
            await verbs.cancel(connection, "nobody")


async def test_what_had_left_when_it_was_cancelled_is_recorded(scene: Scene) -> None:
    exchange = await scene.begin("sent")
    await scene.call(verbs.cancel)
    await scene.write(scene.answer(exchange, key="sent"))
    [step] = await scene.call(runs.steps)
    assert step.state is State.ANSWERED


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.DIVERGED, RunStatus.OVER_BUDGET])
async def test_a_retried_run_is_queued_and_counts_anew(scene: Scene, status: RunStatus) -> None:
    await scene.step("answered", facts=PROVISIONAL)
    await put(scene, status)
    assert await scene.call(verbs.retry) is RunStatus.QUEUED
    row = await scene.call(runs.get_run)
    assert (row.status, row.error, row.ended_at, row.stop_message, row.barren) == (
        RunStatus.QUEUED,
        None,
        None,
        None,
        0,
    )
    # Who had it is fenced; the next attempt tries what was not final.
    assert await scene.write(scene.intent("new")) == Fenced()
    await scene.again()
    loaded = await scene.journal.load(scene.run_id)
    assert loaded is not None
    assert loaded.last_failed_barren


@pytest.mark.parametrize(
    ("status", "words"),
    [(RunStatus.DONE, "start another"), (RunStatus.QUEUED, "by itself"), (RunStatus.RUNNING, "by itself"),
     (RunStatus.PARKED, "by itself"), (RunStatus.AMBIGUOUS, "twiceshy resolve")],
)  # fmt: skip
async def test_what_is_not_retried_says_why(scene: Scene, status: RunStatus, words: str) -> None:
    await put(scene, status)
    with pytest.raises(NotNow, match=words):
        await scene.call(verbs.retry)
    assert (await scene.call(runs.get_run)).status is status


async def test_a_retry_asks_about_answers_in_doubt_first(scene: Scene) -> None:
    await scene.step("mail", facts=DOUBTFUL)
    await scene.call(verbs.cancel)
    assert await scene.call(verbs.retry) is RunStatus.AMBIGUOUS
    row = await scene.call(runs.get_run)
    assert row.stop_step == "mail"
    assert "a person wants it tried again" in (row.stop_message or "")
    assert await scene.call(runs.resolve, "mail", "assume_done") is RunStatus.QUEUED


async def test_a_question_that_a_cancel_left_open_is_asked_again_by_a_retry(scene: Scene) -> None:
    exchange = await scene.begin("mail")
    await scene.write(scene.stop(exchange, "mail"))
    assert await scene.call(verbs.cancel) is RunStatus.AMBIGUOUS
    assert await scene.call(verbs.retry) is RunStatus.AMBIGUOUS
    assert (await scene.call(runs.get_run)).stop_step == "mail"


async def test_a_retried_run_of_workers_is_theirs_again(scene: Scene) -> None:
    async with scene.journal.connection() as connection:
        run = await queue.start(connection, "a", None)
        taken: dict[str, Any] = {"worker": "w", "host": "h", "folder": "f", "lease": 30.0}
        assert await queue.claim_next(connection, ["a"], **taken) is not None
        await verbs.cancel(connection, run)
        assert await queue.requeue_silent(connection, lease=0.0, backoff=0.0) is None
        await verbs.retry(connection, run)
        job = await queue.claim_next(connection, ["a"], **taken)
        assert job is not None
        assert (job.claim.run_id, job.claim.n, job.claim.barren) == (run, 2, 0)
