"""A run that continues as another: it is done with the answer to ``POST /continue``, and what comes after is refused.

There is nothing in between: the successor is made in the transaction that ends the run. Whoever asks again, since the
answer did not reach him, is told the same one.
"""

import asyncio
import json

from proxy.refusals import Refusal, ways_out
from proxy.run import Run
from proxy.stops import continued
from runtime import kin, payload
from runtime.errors import UsageError
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.tokens import derived_id

#: Between two looks whether all that left has ended, in seconds.
_LOOK = 0.05


async def continue_as_new(run: Run, body: bytes, journal: Journal, settings: Settings) -> bytes | Refusal:
    """End *run* and have it go on as another one with the input in *body*. Raises DatabaseAway."""
    try:
        given = payload.read(body, settings.payload_max, "the body") if body.strip() else {}
        if not isinstance(given, dict) or not given.keys() <= {"input"}:
            raise UsageError('the body is {"input": …}')
    except UsageError as error:
        return Refusal("bad-request", f"POST /continue: {error}.", run.run_id)
    if run.stale:
        return Refusal(
            "no-attempt", f"Run {run.run_id} does not continue: {run.stale}. {ways_out(run.run_id)}", run.run_id
        )
    try:
        async with asyncio.timeout(settings.exchange_timeout):
            while run.open:  # what left ends first, as it does when an agent ends
                await asyncio.sleep(_LOOK)
    except TimeoutError:
        return _unfinished(run, "is still out after exchange_timeout")
    if run.refusal is not None:
        return run.refusal
    if run.unheard:
        return _unfinished(run, f"({', '.join(run.unheard[:5])}) got no final answer, and nobody was there to hear it")
    reach("before-record")
    text = payload.member(body, "input") if given else None
    found = await kin.continue_as_new(journal, run.fence, derived_id(run.uuid, "continue"), text)
    reach("recorded")
    if not isinstance(found, str):
        run.refuse(run.outcome_refusal(found))
        return run.refusal or run.outcome_refusal(found)
    run.refuse(continued(run.run_id, found))
    return told(found)


def told(successor: str) -> bytes:
    """As whom the run goes on."""
    return json.dumps({"run": successor}).encode("ascii")


def _unfinished(run: Run, what: str) -> Refusal:
    return Refusal(
        "bad-request", f"Run {run.run_id} does not continue: a call of it {what}. Wait for it first.", run.run_id
    )
