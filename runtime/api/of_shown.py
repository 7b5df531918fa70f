"""What is to be seen of a run: its journal, its timeline, its attempts; and sums over all runs."""

from typing import Any

from runtime import journals, listing, runs, stats, tape
from runtime.api import answers, asked
from runtime.api.call import Call
from runtime.api.of_runs import place
from runtime.api.routes import Answer, Routes
from runtime.tapes import read_tape

ROUTES = Routes("shown")


@ROUTES.add("GET", "/v1/runs/{run}/journal", {200: answers.JournalPage}, problems=(404,))
async def get_journal(call: Call, path: asked.OfRun, query: asked.Paging) -> Answer:
    """Show the steps of a run, with all answers of each.

    In the order in which they began. Of answers, headers and the beginning of the body; what looks like a credential is
    masked.
    """
    behind = -1 if query.cursor is None else place(query.cursor)
    async with call.connection() as connection:
        found = await journals.page(connection, path.run, behind=behind, limit=query.limit + 1)
    more = len(found) > query.limit
    return Answer(
        answers.JournalPage(
            steps=[_step(each) for each in found[: query.limit]],
            next=str(found[query.limit - 1].begun) if more else None,
        )
    )


def _step(step: journals.Step) -> answers.JournalStep:
    values: dict[str, Any] = {name: getattr(step, name) for name in answers.JournalStep.model_fields}
    return answers.JournalStep(**values | {"answers": [_answer(each) for each in step.answers]})


def _answer(answer: journals.Answer) -> answers.JournalAnswer:
    return answers.JournalAnswer(**{name: getattr(answer, name) for name in answers.JournalAnswer.model_fields})


@ROUTES.add("GET", "/v1/runs/{run}/timeline", {200: answers.Timeline}, problems=(404,))
async def get_timeline(call: Call, path: asked.OfRun) -> Answer:
    """Show a run's tape: its attempts side by side, and what each step was to each of them."""
    async with call.connection() as connection:
        return Answer(tape.as_json(await read_tape(connection, path.run)))


@ROUTES.add("GET", "/v1/runs/{run}/attempts", {200: answers.Attempts}, problems=(404,))
async def list_attempts(call: Call, path: asked.OfRun) -> Answer:
    """List the attempts of a run, the first one first."""
    async with call.connection() as connection:
        await listing.line(connection, path.run)
        found = await runs.attempts(connection, path.run)
    shown = []
    for row in found:
        line = tape.read_attempt(row.n, row.outcome, row.exit_code, row.tape)
        counts = line.counts or tape.Counts()
        shown.append(
            answers.Attempt(
                n=row.n, kind=row.kind, host=row.host, sidecar=row.sidecar, started_at=row.started_at,
                ended_at=row.ended_at, outcome=row.outcome, exit_code=row.exit_code, live=counts.live,
                replayed=counts.replayed, joined=counts.joined, drift=counts.drift, calls_saved=counts.calls_saved,
                tokens_saved=counts.tokens_saved, hints=list(line.hints),
            )
        )  # fmt: skip
    return Answer(answers.Attempts(attempts=shown))


@ROUTES.add("GET", "/v1/stats", {200: answers.Stats})
async def get_stats(call: Call, query: asked.Since) -> Answer:
    """Add up what happened, and what replay saved.

    `recoveries` are attempts that took up what one before them had left. `money_saved` is an estimate: the tokens that
    were not paid for again, at the setting `token_price`; null where none is set.
    """
    async with call.connection() as connection:
        found = await stats.read(connection, query.since)
    values: dict[str, Any] = {name: getattr(found, name) for name in stats.Stats.__slots__}
    return Answer(answers.Stats(**values, money_saved=stats.money(found.tokens_saved, call.settings.token_price)))
