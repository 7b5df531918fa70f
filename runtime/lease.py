"""Who may be the current attempt of a run, and since when somebody silent is dead. Pure: time is an argument.

Two proofs of death:

* *A proof.* The claimer holds the lock that the owner held while it lived, or has seen that its processes are
  gone. It holds at once, for whom it can concern (``concerns``), and for nobody else.
* *The clock.* The lease is over, by the database's clock. Time without the database does not count: owners
  could not renew, however alive. So the server must have been up for longer than a lease, and whoever judges
  must itself have been connected for longer than a lease. Owners renew first.

A queued run has no owner. Only *take-overs* wait. Nor does who claims a token wait for an attempt that has none
of its own: its sidecar keeps the token, which fences it, and to claim is one of the ways out that it is told.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from runtime.step import RunStatus

#: An owner believes in its lease this part of it shorter than the others do: clocks drift, replies travel.
MARGIN: Final = 0.1
#: Kinds of attempt whose process somebody of ours watches, and whose exit code tells how it ended.
LAUNCHED: Final = ("launcher", "worker")
#: Kinds of attempt whose token nobody was given: a process group, and one that names its steps.
TOKENLESS: Final = ("group", "named")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whoever has a lease, as its row says."""

    kind: str
    host: str
    folder: str


@dataclass(frozen=True, slots=True)
class Clock:
    """What the database says about time."""

    now: datetime
    server_started: datetime
    connected: datetime  # since when the judge has been connected


def silent_for(clock: Clock, expires_at: datetime | None, lease: float) -> float:
    """Seconds until an owner that stays silent may be judged dead by the clock; 0: it may.

    *expires_at* None: it has no lease, so there is nothing to wait for.
    """
    if expires_at is None:
        return 0.0
    counted = max(clock.server_started, clock.connected)
    left = max((expires_at - clock.now).total_seconds(), lease - (clock.now - counted).total_seconds())
    # "Later than", not "at": the moment of expiry still is the owner's.
    return max(0.0, left) if left < 0 else max(left, 1e-6)


def concerns(owner: Owner, claimer: Owner) -> bool:
    """Whether a proof of death that *claimer* has can be about *owner*.

    A launcher's or a worker's lock lies in its state folder; a process group is seen from its host; attempts that name
    each step (kind *named*) follow one another freely. A token that was handed out (kind *claim*) is proved by none.
    """
    if owner.kind != claimer.kind:
        return False
    match owner.kind:
        case kind if kind in LAUNCHED:
            return owner == claimer
        case "group":
            return owner.host == claimer.host
        case kind:
            return kind == "named"


def gives_way(owner: Owner, claimer: Owner) -> bool:
    """Whether *owner* has no token of its own, and *claimer* asks for one."""
    return owner.kind in TOKENLESS and claimer.kind not in TOKENLESS


@dataclass(frozen=True, slots=True)
class Free:
    """The run may be claimed. ``over``: in place of an owner that is dead."""

    over: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """It has an owner that may be alive, at least for ``wait`` seconds more."""

    wait: float


@dataclass(frozen=True, slots=True)
class Closed:
    """It cannot be claimed as it stands: it ended, is parked, or needs a person."""


def judge(
    status: RunStatus,
    owner: Owner | None,
    claimer: Owner,
    *,
    proved_dead: bool,
    clock: Clock,
    expires_at: datetime | None,
    lease: float,
) -> Free | Busy | Closed:
    """Say whether *claimer* may have the run. *proved_dead*: it has a proof that the owner is dead."""
    if status is RunStatus.QUEUED:
        return Free(over=False)
    if status is not RunStatus.RUNNING:
        return Closed()
    if owner is None or (proved_dead and concerns(owner, claimer)) or gives_way(owner, claimer):
        return Free(over=True)
    wait = silent_for(clock, expires_at, lease)
    return Busy(wait) if wait else Free(over=True)


def believed_until(confirmed: float, lease: float) -> float:
    """Until when an owner may act on a lease whose last *confirmed* renewal was asked for at *confirmed*.

    All on the owner's monotonic clock; *confirmed* is taken before the renewal is sent.
    """
    return confirmed + lease * (1.0 - MARGIN)
