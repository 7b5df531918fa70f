"""What an agent may import. Standard library only, so that it can be put beside any agent's own packages.

Agents need none of it: a request that passes the sidecar is journalled whatever sent it. It is for what is no request:

    import twiceshy

    @twiceshy.agent
    def publish(given):
        draft = twiceshy.llm(f"Write about {given['topic']}.", model="gpt-5")
        twiceshy.sleep(3600)
        if twiceshy.wait_approval("publish", draft, timeout=3 * 86400):
            twiceshy.step("post", post, draft)

    if __name__ == "__main__":
        publish.main()

All of it may be called from any thread; ``twiceshy.aio`` has the same names for ``await``. docs/library.md tells more.
"""

from twiceshy import agent_api, models, steps
from twiceshy.agent_api import Approval, Event
from twiceshy.client import Client
from twiceshy.drive import blocking
from twiceshy.entry import activity, agent
from twiceshy.errors import (
    Ambiguous,
    ChildFailed,
    Continued,
    Diverged,
    Fenced,
    InvalidAnswer,
    NotUnderTwiceshy,
    OverBudget,
    Parked,
    Refused,
    StepFailed,
    Stopped,
    TimedOut,
    Unreachable,
)
from twiceshy.steps import idempotency_key, progress

__version__ = "0.1.0.dev0"

__all__ = [
    "Ambiguous",
    "Approval",
    "ChildFailed",
    "Client",
    "Continued",
    "Diverged",
    "Event",
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

continue_as_new = blocking(agent_api.continue_as_new)
heartbeat = blocking(steps.heartbeat)
input = blocking(agent_api.input)  # noqa: A001 - what agents call it
llm = blocking(models.llm)
now = blocking(agent_api.now)
random = blocking(agent_api.random)
result = blocking(agent_api.result)
set_result = blocking(agent_api.set_result)
should_continue_as_new = blocking(agent_api.should_continue_as_new)
sleep = blocking(agent_api.sleep)
start = blocking(agent_api.start)
step = blocking(steps.step)
transaction = blocking(steps.transaction)
uuid4 = blocking(agent_api.uuid4)
wait_approval = blocking(agent_api.wait_approval)
wait_event = blocking(agent_api.wait_event)
