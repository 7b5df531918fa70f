"""The library for programs with an event loop: the same names as in ``twiceshy``, to be awaited.

    from twiceshy import aio

    async def refund(given):
        order, customer = await asyncio.gather(aio.step("order", load, 1), aio.step("customer", load, 2))
        await aio.sleep(3600)

A wait whose task is cancelled lets go of its connection at once. A function that blocks is called in a thread.
"""

from twiceshy import agent_api, models, steps
from twiceshy.client import AsyncClient as Client
from twiceshy.drive import awaited
from twiceshy.entry import activity, agent
from twiceshy.steps import idempotency_key, progress

__all__ = [
    "Client",
    "activity",
    "agent",
    "continue_as_new",
    "heartbeat",
    "idempotency_key",
    "input",
    "llm",
    "now",
    "progress",
    "random",
    "result",
    "set_result",
    "should_continue_as_new",
    "sleep",
    "start",
    "step",
    "transaction",
    "uuid4",
    "wait_approval",
    "wait_event",
]

continue_as_new = awaited(agent_api.continue_as_new)
heartbeat = awaited(steps.heartbeat)
input = awaited(agent_api.input)  # noqa: A001 - what agents call it
llm = awaited(models.llm)
now = awaited(agent_api.now)
random = awaited(agent_api.random)
result = awaited(agent_api.result)
set_result = awaited(agent_api.set_result)
should_continue_as_new = awaited(agent_api.should_continue_as_new)
sleep = awaited(agent_api.sleep)
start = awaited(agent_api.start)
step = awaited(steps.step)
transaction = awaited(steps.transaction)
uuid4 = awaited(agent_api.uuid4)
wait_approval = awaited(agent_api.wait_approval)
wait_event = awaited(agent_api.wait_event)
