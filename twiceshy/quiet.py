"""What Python says by itself of a ``Stopped`` that nobody caught, is not said: that is how an attempt ends.

Done only when there is one. Whoever set a hook or a handler keeps it for all else.
"""

import threading
from typing import TYPE_CHECKING, Any

from twiceshy.errors import Stopped

if TYPE_CHECKING:
    import asyncio


def in_threads() -> None:
    """A thread ends with it as with any SystemExit; of a subclass a traceback would be printed."""
    before = threading.excepthook
    if threading.current_thread() is threading.main_thread() or getattr(before, "of_twiceshy", False):
        return

    def hook(args: Any) -> None:
        if not issubclass(args.exc_type, Stopped):
            before(args)

    hook.of_twiceshy = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def on_loop(loop: "asyncio.AbstractEventLoop") -> None:
    """It ends the loop, and tasks that end with it after that (those of a group) are heard by nobody."""
    before = loop.get_exception_handler()
    if getattr(before, "of_twiceshy", False):
        return

    def handler(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), Stopped):
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    handler.of_twiceshy = True  # type: ignore[attr-defined]
    loop.set_exception_handler(handler)
