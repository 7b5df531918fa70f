"""Who may act for a run: races between claims, binds and entries, and leases judged by the clock."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from runtime import runs
from runtime.database import Connection, connect
from runtime.entries import Begun, Bound, Fenced
from runtime.errors import Held, NotNow
from runtime.journal import Journal
from runtime.step import RunStatus
from tests.database.samples import SETTINGS, SIDECAR, Scene, claim, opened, register


async def test_a_claim_and_an_intent_never_both_win(journal: Journal) -> None:
    won = set()
    for n in range(40):
        scene = await claim(journal)
        await journal.bind(scene.fence)
        intents = [scene.intent(f"k{k}") for k in range(3)]

        async def later(scene: Scene = scene, ticks: int = n) -> Scene:
            for _ in range(ticks % 8):
                await asyncio.sleep(0)
            return await scene.again()

        *outcomes, after = await asyncio.gather(*map(journal.write, intents), later())
        assert isinstance(after, Scene)
        claimed_at = (await scene.call(runs.last_attempt)).counter_at
        for outcome in outcomes:
            won.add(type(outcome))
            if isinstance(outcome, Begun):
                assert outcome.begun <= claimed_at
            else:
                assert outcome == Fenced()
        assert {step.attempt for step in await scene.call(runs.steps)} <= {1}
    assert Begun in won


async def test_an_attempt_lives_with_one_sidecar(journal: Journal) -> None:
    for _ in range(10):
        scene = await claim(journal)
        fences = [replace(scene.fence, sidecar=f"sidecar-{n}") for n in range(4)]
        outcomes = await asyncio.gather(*(journal.bind(fence) for fence in fences))
        bound = [fence for fence, outcome in zip(fences, outcomes, strict=True) if isinstance(outcome, Bound)]
        assert len(bound) == 1
        assert {outcome for outcome in outcomes if isinstance(outcome, Fenced)} == {Fenced(bound[0].sidecar)}
        assert (await scene.call(runs.last_attempt)).sidecar == bound[0].sidecar


async def test_one_of_two_claims_wins(journal: Journal) -> None:
    async with journal.connection() as connection:
        run_id = await runs.create(connection, None)

    async def attempt(kind: str) -> object:
        async with journal.connection() as connection:
            try:
                return await runs.claim(connection, run_id, kind=kind, host="h", folder="f", lease=30.0)
            except Held as error:
                return error

    found = await asyncio.gather(*(attempt("claim") for _ in range(4)))
    assert sum(isinstance(one, runs.Claim) for one in found) == 1
    held = next(one for one in found if isinstance(one, Held))
    assert 0 < held.wait <= 30
    assert run_id in str(held)
    assert "attempt 1" in str(held)


# ---- leases judged by the clock


async def at(connection: object, moment: str) -> None:
    await connection.execute(f"SET twiceshy.now = '{moment}'")  # type: ignore[attr-defined]


async def test_only_time_with_the_database_counts(dsn: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        now = await connection.fetchval("SELECT clock_timestamp()")
        run_id = await runs.create(connection, None)
        first = await runs.claim(connection, run_id, kind="claim", host="far", folder="f", lease=30.0)

        async def take(seconds: float, lease: float = 30.0) -> runs.Claim:
            await at(connection, (now + timedelta(seconds=seconds)).isoformat())
            return await runs.claim(connection, run_id, kind="claim", host="here", folder="f", lease=lease)

        # The lease is over, but this judge has not been connected for a lease (of its own measure) yet.
        with pytest.raises(Held) as young:
            await take(31.0, lease=90.0)
        assert 50 < young.value.wait < 90
        with pytest.raises(Held) as alive:
            await take(20.0)
        assert 9 < alive.value.wait < 13
        second = await take(40.0)
        assert (second.n, second.barren) == (2, 1)
        assert await runs.renew(connection, run_id, runs.hash_token(first.token), 30.0) is None
        assert (await runs.attempts(connection, run_id))[0].outcome == "died"
    finally:
        await connection.close()


async def test_who_comes_new_to_a_silent_owner_waits_and_has_it(dsn: str) -> None:
    first = await connect(dsn, name="test")
    second = await connect(dsn, name="test")
    try:
        run_id = await runs.create(first, None)
        old = await runs.claim(first, run_id, kind="claim", host="far", folder="f", lease=1.0)
        with pytest.raises(Held) as busy:
            await runs.claim_silent(second, run_id, kind="claim", host="here", folder="f", lease=1.0)
        assert not busy.value.silent
        await eventually_over(first, run_id)
        third = await connect(dsn, name="test")  # too young to judge anybody
        said: list[str] = []
        try:
            new = await runs.claim_silent(
                third, run_id, kind="claim", host="here", folder="f", lease=1.0, say=said.append
            )
        finally:
            await third.close()
        assert (new.n, len(said)) == (2, 1)
        assert await runs.renew(first, run_id, runs.hash_token(old.token), 1.0) is None
    finally:
        await first.close()
        await second.close()


async def eventually_over(connection: Connection, run_id: str) -> None:
    """Wait until the run's lease has run out."""
    async with asyncio.timeout(10):
        while not await connection.fetchval(
            "SELECT lease_expires_at < twiceshy.now() FROM twiceshy.run WHERE id = $1", run_id
        ):
            await asyncio.sleep(0.05)


async def test_owners_renew_first(dsn: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        run_id = await runs.create(connection, None)
        first = await runs.claim(connection, run_id, kind="claim", host="far", folder="f", lease=30.0)
        late = await connection.fetchval("SELECT clock_timestamp() + interval '10 minutes'")
        await at(connection, late.isoformat())
        status = await runs.renew(connection, run_id, runs.hash_token(first.token), 30.0)
        assert status is RunStatus.RUNNING
        with pytest.raises(Held):
            await runs.claim(connection, run_id, kind="claim", host="here", folder="f", lease=30.0)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("kind", "host", "folder", "free"),
    [
        ("launcher", "here", "/state", True),
        ("launcher", "there", "/state", False),
        ("launcher", "here", "/other", False),
        ("group", "here", "/state", False),
        ("claim", "here", "/state", False),
    ],
)
async def test_a_proof_of_death_concerns_only_whom_it_can(
    journal: Journal, kind: str, host: str, folder: str, free: bool
) -> None:
    scene = await claim(journal)
    take = scene.call(runs.claim, kind=kind, host=host, folder=folder, lease=30.0, proved_dead=True)
    if free:
        assert (await take).n == 2
    else:
        with pytest.raises(Held):
            await take


async def test_a_run_that_is_not_to_be_claimed_says_why(scene: Scene) -> None:
    await scene.write(scene.stop(key="s", message="the refund is in doubt"))
    with pytest.raises(NotNow, match=r"the refund is in doubt.*twiceshy resolve"):
        await scene.again()
    other = await claim(scene.journal)
    await other.end("done", 0)
    with pytest.raises(NotNow, match="is done"):
        await other.again()


# ---- renewals by a sidecar


async def test_leases_are_extended_for_those_whose_fence_holds(journal: Journal) -> None:
    short = [await claim(journal, lease=5.0) for _ in range(3)]
    for scene in short:
        await journal.bind(scene.fence)
    await short[1].write(short[1].stop())
    await short[2].again()
    fences = [scene.fence for scene in short]
    seen = await journal.renew(fences, extend=False)
    lease = seen[short[0].run_id]
    assert isinstance(lease, Bound)
    assert lease.lease_left <= 5.0
    extended = await journal.renew(fences, extend=True)
    first, second, third = (extended[scene.run_id] for scene in short)
    assert isinstance(first, Bound)
    assert 5.0 < first.lease_left <= SETTINGS.lease
    assert type(second).__name__ == "Stopped"
    assert third == Fenced()
    assert await journal.renew([], extend=True) == {}


# ---- sidecars


async def test_a_successor_ends_those_before_it_in_its_folder(dsn: str) -> None:
    async with opened(dsn) as journal:
        secret = await register(journal, "one")
        assert len(secret) == 32
        await register(journal, "elsewhere", folder="/other")
        assert await journal.heartbeat("one", 30.0)
        assert await register(journal, "two") == secret
        assert not await journal.heartbeat("one", 30.0)
        assert await journal.heartbeat("two", 30.0)
        assert await journal.heartbeat("elsewhere", 30.0)
        await journal.retire("two")
        assert not await journal.heartbeat("two", 30.0)


async def test_exchanges_of_living_sidecars_are_open(journal: Journal, scene: Scene) -> None:
    await scene.begin("one")
    await scene.step("two")
    assert await scene.call(runs.open_exchanges) == 1
    await journal.retire(SIDECAR)
    assert await scene.call(runs.open_exchanges) == 0
