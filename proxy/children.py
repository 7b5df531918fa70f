"""What a run may start, and wait for: asked before there is a step of it, so that a refusal leaves nothing behind."""

import asyncio
from collections.abc import Mapping

from proxy.own import Asked
from proxy.refusals import Refusal
from proxy.run import Run
from runtime import kin
from runtime.agents import AgentTable, check_input, declared
from runtime.errors import UsageError
from runtime.journal import Journal
from runtime.step import Kind


class Children:
    """Judges what is asked of other runs. One per sidecar."""

    def __init__(self, journal: Journal, agents: Mapping[str, AgentTable]) -> None:
        self._journal = journal
        self._agents = agents

    async def refused(self, run: Run, asked: Asked) -> Refusal | None:
        """Why no step of *run* may begin that is *asked* for; None: it may. Raises DatabaseAway."""
        name = asked.own.subject
        if name is None or asked.own.kind not in (Kind.START, Kind.CHILD):
            return None
        if asked.own.kind is Kind.CHILD:
            if await kin.is_child(self._journal, run.run_id, name):
                return None
            return Refusal("not-found", f"Run {run.run_id} has started no run {name!r}.", run.run_id)
        own = self._agents.get(run.agent)
        if own is None or name not in own.children:
            return Refusal(
                "denied",
                f"Run {run.run_id} (agent {run.agent!r}) may not start {name!r}; nothing was started. In twiceshy.toml "
                f'[agents.{run.agent or "NAME"}] children = ["{name}"] would let it.',
                run.run_id,
            )
        return await self.unfit(run, name, asked.input)

    async def unfit(self, run: Run, agent: str, given: bytes | None) -> Refusal | None:
        """Why *given* is no input for *agent*, which is declared; None: it is one."""
        try:
            table = declared(self._agents, agent)
            await asyncio.get_running_loop().run_in_executor(None, check_input, agent, table, given)
        except UsageError as error:
            return Refusal("bad-request", f"Run {run.run_id}: {error}. Nothing was started.", run.run_id)
        return None
