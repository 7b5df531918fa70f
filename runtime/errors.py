"""Every error of the project, as a tree.

TwiceshyError
├── UsageError            bad input on the command line or in a file: one line, exit code 2
├── NotFound              no such run or step
├── Held                  another attempt has the run (exit code 75)
├── Taken                 a key or an id stands for another start already
├── NotNow                the run or step is not in the state that the verb needs
│   └── Decided           an approval was decided before; carries the first decision
├── DatabaseAway          Postgres cannot be reached: nothing was sent, nothing was written
├── Unreadable            a journal row cannot be understood: fail closed
└── Unwritable            Postgres refuses an entry's values: nothing of it was written
"""

from runtime.entries import Decision


class TwiceshyError(Exception):
    """Base. The message is for the person who reads it: what happened, which run and step, what to do."""


class UsageError(TwiceshyError):
    """Bad input: one line on standard error and exit code 2."""


class NotFound(TwiceshyError):
    """The run or step that was named does not exist."""


class Held(TwiceshyError):
    """Another attempt has the run: its lease has not run out and its process is not proved dead.

    ``wait``: seconds after which the run may be taken over if its owner stays silent; on the same connection,
    because only time with the database counts. ``silent``: the owner's lease has run out, and only the claimer's
    own time with the database is too short to tell.
    """

    def __init__(self, message: str, wait: float = 0.0, *, silent: bool = False) -> None:
        super().__init__(message)
        self.wait = wait
        self.silent = silent


class Taken(TwiceshyError):
    """The key of a start, or the run id, was used for something else."""


class NotNow(TwiceshyError):
    """The verb does not apply to the run or step as it stands."""


class Decided(NotNow):
    """The approval was decided before: the first decision stands. ``first``: that one."""

    def __init__(self, message: str, first: Decision) -> None:
        super().__init__(message)
        self.first = first


class DatabaseAway(TwiceshyError):
    """Postgres cannot be reached. Nothing was sent and nothing was written."""


class Unreadable(TwiceshyError):
    """A row of the journal cannot be understood. It is never taken for 'not there'."""


class Unwritable(TwiceshyError):
    """Postgres refuses the values of an entry (a NUL in a text, a status out of range). Nothing of it was written."""
