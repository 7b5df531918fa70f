"""Approvals: what runs wait for a person to decide."""

from runtime import approvals
from runtime.api import answers, asked
from runtime.api.call import Call
from runtime.api.json_text import stored
from runtime.api.problems import Problem
from runtime.api.routes import Answer, Routes
from runtime.entries import Decision
from runtime.errors import Decided
from runtime.listing import make_cursor, read_cursor

ROUTES = Routes("approvals")


def decided(decision: Decision) -> answers.Decision:
    """A decision, as it is shown."""
    return answers.Decision(**{name: getattr(decision, name) for name in answers.Decision.model_fields})


@ROUTES.add("GET", "/v1/approvals", {200: answers.ApprovalPage})
async def list_approvals(call: Call, query: asked.ApprovalFilters) -> Answer:
    """List what waits for a decision, the oldest first."""
    behind = None
    if query.cursor is not None:
        at, run, key = read_cursor(query.cursor, keys=2)
        behind = (at, run, key)
    async with call.connection() as connection:
        found = await approvals.open_ones(
            connection, run=query.run, name=query.name, limit=query.limit + 1, behind=behind
        )
    page = found[: query.limit]
    shown = [
        answers.Approval(
            run=each.run, id=each.id, name=each.name, request=stored(each.request), asked_at=each.asked_at,
            deadline=each.deadline,
        )
        for each in page
    ]  # fmt: skip
    more = len(found) > query.limit
    return Answer(answers.ApprovalPage(approvals=shown, next=make_cursor(*page[-1].place) if more else None))


@ROUTES.add("POST", "/v1/approvals/{run}/{approval}", {200: answers.Decision}, problems=(404, 409))
async def decide_approval(call: Call, path: asked.OfApproval, body: asked.Decide) -> Answer:
    """Approve, or decline.

    An approval answers one wait of its run. It goes by its id, or by its name while the run has had no other of that.
    The first decision stands: 409 tells it as `first`.
    """
    try:
        async with call.connection() as connection:
            found = await approvals.decide(
                connection, path.run, path.approval, body.decision, by=body.by, comment=body.comment
            )
    except Decided as error:
        raise Problem(409, str(error), {"first": decided(error.first)}) from error
    return Answer(decided(found))
