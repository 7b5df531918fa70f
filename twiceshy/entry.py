"""Decorators: a program's entry, and functions that are steps.

    @activity(max_tries=3, timeout=60)
    def charge(order, cents): ...

    @agent
    def refund(given):
        charge(given["order"], 990)
        return {"refunded": 990}

    if __name__ == "__main__":
        refund.main()

``python refund.py``, ``python -m refunds.refund`` and ``python -m twiceshy refunds.refund:refund`` all do the same: the
run's input is read, and what the function returns is the run's result. Activities run in the agent's own process, as
steps of its run. To have work done elsewhere, start a run (``start``, ``result``): a worker anywhere does it.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

from twiceshy import agent_api, steps
from twiceshy.drive import awaited, blocking
from twiceshy.operation import Operation

P = ParamSpec("P")
T = TypeVar("T")


class Agent(Generic[P, T]):
    """A function that is a program's entry. Called, it is that function; ``main`` does a run with it."""

    __name__: str

    def __init__(self, work: Callable[P, T]) -> None:
        functools.update_wrapper(self, work)
        self.work = work

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.work(*args, **kwargs)

    def main(self) -> None:
        """Do the run that this process was started for."""
        if inspect.iscoroutinefunction(self.work):
            import asyncio

            asyncio.run(self._main_awaited())
            return
        value = self.work(*self._given(blocking(agent_api.input)))  # type: ignore[call-arg]
        if value is not None:
            blocking(agent_api.set_result)(value)

    async def _main_awaited(self) -> None:
        given = [await each for each in self._given(awaited(agent_api.input))]
        value = await self.work(*given)  # type: ignore[call-arg,misc]
        if value is not None:
            await awaited(agent_api.set_result)(value)

    def _given(self, read: Callable[[], Any]) -> list[Any]:
        """The run's input, for a function that takes one."""
        return [read()] if inspect.signature(self.work).parameters else []


def agent(work: Callable[P, T]) -> Agent[P, T]:
    """Make *work* an agent's entry: it is given the run's input, and returns the run's result."""
    return Agent(work)


def run(name: str) -> None:
    """Do this process's run with the agent *name*: ``package.module:function``."""
    module, colon, function = name.partition(":")
    if not colon:
        raise SystemExit(f"{name!r}: write module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found = getattr(importlib.import_module(module), function)
    (found if isinstance(found, Agent) else Agent(found)).main()


@overload
def activity(work: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def activity(
    *, name: str | None = None, at_most_once: bool = False, max_tries: int | None = None,
    timeout: float | timedelta | None = None, heartbeat_timeout: float | timedelta | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...  # fmt: skip


def activity(
    work: Callable[..., Any] | None = None, /, *, name: str | None = None, at_most_once: bool = False, **limits: Any
) -> Any:
    """Make each call of a function a step: done once, its output kept. As ``step``, which says what the options are.

    What it returns is JSON from then on: a tuple is a list.
    """
    if work is None:
        return functools.partial(activity, name=name, at_most_once=at_most_once, **limits)
    called, limit, signature = name or work.__name__, steps.limits_of(work, **limits), inspect.signature(work)

    def operation(*args: Any, **kwargs: Any) -> Operation[Any]:
        bound = signature.bind(*args, **kwargs)
        done = functools.partial(work, *bound.args, **bound.kwargs)
        # What is given by name only stands beside the rest.
        given = [list(bound.args), bound.kwargs] if bound.kwargs else list(bound.args)
        return (yield from steps.perform(called, given, done, limit, at_most_once=at_most_once))

    doing = awaited(operation) if inspect.iscoroutinefunction(work) else blocking(operation)
    return functools.update_wrapper(doing, work)
