"""Who may take a run over: the rule, and what it promises over any course of time."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.lease import (
    LAUNCHED,
    Busy,
    Clock,
    Closed,
    Free,
    Owner,
    believed_until,
    concerns,
    gives_way,
    judge,
    silent_for,
)
from runtime.step import RunStatus

START = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = 30.0
KINDS = ("launcher", "worker", "claim", "group", "named")
SECONDS = st.floats(-1000, 1000)
OWNERS = st.builds(
    Owner, st.sampled_from(KINDS), st.sampled_from(["here", "there"]), st.sampled_from(["/state", "/other"])
)
ME = Owner("launcher", "here", "/state")


def moment(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def clock(now: float, server: float = -1000.0, connected: float = -1000.0) -> Clock:
    return Clock(moment(now), moment(server), moment(connected))


@pytest.mark.parametrize(
    ("now", "server", "connected", "wait"),
    [
        (0.0, -1000.0, -1000.0, 10.0),  # its lease lasts ten seconds more
        (10.5, -1000.0, -1000.0, 0.0),  # it is over
        (10.5, 0.0, -1000.0, 19.5),  # but the server came up since
        (10.5, -1000.0, 5.0, 24.5),  # but the judge was away since
        (40.0, 5.0, 5.0, 0.0),
    ],
)
def test_when_silence_means_death(now: float, server: float, connected: float, wait: float) -> None:
    assert silent_for(clock(now, server, connected), moment(10.0), LEASE) == pytest.approx(wait)


def test_the_moment_of_expiry_is_still_the_owners() -> None:
    assert silent_for(clock(10.0), moment(10.0), LEASE) > 0


def test_who_has_no_lease_is_not_waited_for() -> None:
    assert silent_for(clock(0.0, 0.0, 0.0), None, LEASE) == 0


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0.001, 100))
def test_the_wait_is_exact(now: float, server: float, connected: float, expires: float, lease: float) -> None:
    """Before the wait is over nobody may take over, after it anybody may."""
    seen = clock(now, server, connected)
    wait = silent_for(seen, moment(expires), lease)
    assert wait >= 0
    later = replace(seen, now=seen.now + timedelta(seconds=wait + 0.001))
    assert silent_for(later, moment(expires), lease) == 0
    if wait > 0.001:
        sooner = replace(seen, now=seen.now + timedelta(seconds=wait - 0.001))
        assert silent_for(sooner, moment(expires), lease) > 0


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_death_by_the_clock_takes_all_three(now: float, server: float, connected: float, expires: float) -> None:
    dead = silent_for(clock(now, server, connected), moment(expires), LEASE) == 0
    if dead:
        assert moment(expires) < moment(now)
        assert moment(server) + timedelta(seconds=LEASE) < moment(now)
        assert moment(connected) + timedelta(seconds=LEASE) < moment(now)


# ---- over time: an owner that renews, a database that comes and goes, a claimer


@given(
    outages=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), max_size=5),
    restarts=st.booleans(),
    offset=st.integers(0, 9),
    dies=st.one_of(st.none(), st.integers(0, 300)),
)
def test_the_living_are_never_taken_over_and_the_dead_always(
    outages: list[tuple[int, int]], restarts: bool, offset: int, dies: int | None
) -> None:
    """Each second: the owner renews when a third of its lease is over, or as soon as the database is back.

    The database's clock goes on while it is away. When it comes back the claimer comes at once, before the
    owner has renewed. As long as the owner believes in its lease, and while it lives at all, nobody else gets
    the run; once it is dead, somebody does.
    """
    away = {second for start, length in outages for second in range(start, start + length)}
    renewed, expires, believes = 0.0, LEASE, believed_until(0.0, LEASE)
    server, connected = -1000.0, -1000.0
    was_away = False
    for now in range(1, 600):
        if now in away:
            was_away = True
            continue
        if was_away:
            connected = now
            server = now if restarts else server
            was_away = False
        alive = dies is None or now < dies
        free = silent_for(clock(now, server, connected), moment(expires), LEASE) == 0
        assert not (free and alive)
        assert not (free and now <= believes)
        if free:
            return
        if alive and now - renewed >= LEASE / 3 + offset:
            renewed, expires = now, now + LEASE
            believes = believed_until(now, LEASE)
    assert dies is None or any(second > 500 for second in away)


def test_an_owner_believes_in_its_lease_shorter_than_others_do() -> None:
    assert believed_until(100.0, LEASE) == pytest.approx(127.0)


# ---- claims


@given(OWNERS, OWNERS)
def test_a_proof_of_death_is_about_ones_own_kind(owner: Owner, claimer: Owner) -> None:
    if concerns(owner, claimer):
        assert owner.kind == claimer.kind
        assert owner.kind != "claim"
        assert owner.kind == "named" or owner.host == claimer.host
        assert owner.kind not in LAUNCHED or owner.folder == claimer.folder


@given(st.sampled_from(RunStatus), st.none() | OWNERS, OWNERS, st.booleans(), SECONDS)
def test_what_may_be_claimed(
    status: RunStatus, owner: Owner | None, claimer: Owner, proved: bool, expires: float
) -> None:
    found = judge(status, owner, claimer, proved_dead=proved, clock=clock(0.0), expires_at=moment(expires), lease=LEASE)
    match status:
        case RunStatus.QUEUED:
            assert found == Free(over=False)
        case RunStatus.RUNNING:
            if isinstance(found, Busy):
                assert owner is not None
                assert found.wait > 0
                assert not (proved and concerns(owner, claimer))
                assert not gives_way(owner, claimer)
            else:
                assert found == Free(over=True)
                assert (
                    owner is None or expires < 0 or (proved and concerns(owner, claimer)) or gives_way(owner, claimer)
                )
        case _:
            assert found == Closed()


def test_who_asks_for_a_token_need_not_wait_for_one_without() -> None:
    """A run named without a token: a later claim fences it. It holds against its own kind like any other."""
    for kind in KINDS:
        owner, fresh = Owner(kind, "here", "/state"), clock(0.0, 0.0, 0.0)
        for claimer in KINDS:
            found = judge(
                RunStatus.RUNNING, owner, Owner(claimer, "there", "/other"), proved_dead=False, clock=fresh,
                expires_at=moment(LEASE), lease=LEASE,
            )  # fmt: skip
            free = kind in ("group", "named") and claimer in (*LAUNCHED, "claim")
            assert found == (Free(over=True) if free else Busy(LEASE))


def test_what_a_lock_proves_holds_at_once() -> None:
    fresh = clock(0.0, 0.0, 0.0)
    for proved, expected in ((True, Free(over=True)), (False, Busy(LEASE))):
        found = judge(RunStatus.RUNNING, ME, ME, proved_dead=proved, clock=fresh, expires_at=moment(LEASE), lease=LEASE)
        assert found == expected
