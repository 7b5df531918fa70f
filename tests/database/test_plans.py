"""Hot statements touch one run, by its primary key, however much else there is."""

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from runtime import database, listing, runs
from runtime.database import Connection, connect, sql
from runtime.entries import PutBack
from runtime.journal import Journal
from runtime.rows import entry_row
from tests.database.samples import PROVISIONAL, Scene, answer, claim

#: Statements that look for more than one run, and what for.
OF_MANY = {
    "runs": "the list for people",
    "runs_of_attributes": "the same, by the index of attributes",
    "predecessors_end": "sidecars of a folder, by their own index",
    "clock": "the own backend",
    "installation": "one row",
    "secret": "one row",
    "started": "a key, by the primary key",
    "forget_starts": "old keys, by their own index",
    "api_key": "a key, by the primary key",
    "alive": "one row",
    "stats_of_runs": "all of them are counted, within a bound",
    "stats_of_attempts": "the same",
    "stats_of_answers": "the same",
    "open_approvals": "the list for people, by its own index",
    "wake": "parked runs that are due, by their own index",
    "next_queued": "the head of the queue, by its own index",
    "next_silent": "leases that are over, by their own index",
    "next_of_the_dead": "runs that are running, by their own index",
    "any_of_the_dead": "the same",
}
#: By which indexes a worker finds what it has to do.
LOOKS_FOR_WORK = {
    "next_queued": {"run_queue"},
    "next_silent": {"run_held"},
    "next_of_the_dead": {"run_held", "run_status"},
    "any_of_the_dead": {"run_held", "run_status"},
    "wake": {"run_wakes", "run_pkey"},
    "forget_starts": {"start_at", "start_pkey", "run_pkey"},
}
ABOUT_SCHEMA = ("migration", "now", "bounded", "write", "custom_plans", "patient")


@pytest.fixture
async def full(dsn: str, journal: Journal) -> AsyncIterator[Connection]:
    """300 runs of 40 steps."""
    scene = await claim(journal)
    await scene.step()
    connection = await connect(dsn, name="test")
    await connection.execute(
        """
        INSERT INTO twiceshy.run (id, status, token_hash, sidecar, attempt, counter)
            SELECT 'other-' || n, 'running', sha256(n::text::bytea), 'x', 1, 0 FROM generate_series(1, 5000) n;
        INSERT INTO twiceshy.attempt (run_id, n, token_hash, kind, host, folder, counter_at)
            SELECT 'other-' || n, 1, sha256(n::text::bytea), 'claim', '', '', 0 FROM generate_series(1, 300) n;
        INSERT INTO twiceshy.step (run_id, key, begun, attempt, effect, state, explicit, fingerprint, occurrence,
                secondary, method, url, exchange, sidecar, place, request_head, request_body, rules)
            SELECT 'other-' || n, 'k' || k, k, 1, effect, state, explicit, fingerprint, occurrence, secondary,
                method, url, exchange, sidecar, place, request_head, request_body, rules
            FROM twiceshy.step, generate_series(1, 300) n, generate_series(1, 40) k;
        INSERT INTO twiceshy.answer (run_id, key, n, recorded, attempt, status, reason, headers, size, whole,
                finality, own)
            SELECT 'other-' || n, 'k' || k, 0, k, 1, 200, '', '', 0, true, 'final', false
            FROM generate_series(1, 300) n, generate_series(1, 40) k;
        INSERT INTO twiceshy.event (run_id, name, id, sent, payload, at)
            SELECT 'other-' || n, 'go', 'e' || k, k, '1', now()
            FROM generate_series(1, 300) n, generate_series(1, 40) k;
        INSERT INTO twiceshy.approval (run_id, id, name, asked_at)
            SELECT 'other-' || n, 'k' || k, 'go', now() FROM generate_series(1, 300) n, generate_series(1, 40) k;
        INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
            SELECT 'other-' || n, 'k' || k, 'v', now() FROM generate_series(1, 300) n, generate_series(1, 40) k;
        INSERT INTO twiceshy.body SELECT 'other-' || n, gen_random_uuid(), 0, sha256('')
            FROM generate_series(1, 300) n, generate_series(1, 40);
        INSERT INTO twiceshy.sidecar (id, host, folder, pid, address, expires_at, ended_at)
            SELECT n::text, n::text, n::text, 1, '', now(), CASE WHEN n % 2 = 0 THEN now() END
            FROM generate_series(1, 5000) n;
        """
    )
    await connection.execute("ANALYZE")
    yield connection
    await connection.close()


def scans(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of *plan* that read a table of ours."""
    below = [node for child in plan.get("Plans", ()) for node in scans(child)]
    return [*below, plan] if "Relation Name" in plan else below


def names() -> list[str]:
    return [name for name in database._statements() if not name.startswith(ABOUT_SCHEMA)]


async def plan_of(connection: Connection, name: str) -> dict[str, Any]:
    """The plan that is made once, for whatever arguments come."""
    statement = await connection.prepare(sql(name))
    arguments = ", ".join("NULL" for _ in statement.get_parameters())
    await connection.execute(f"PREPARE it AS {sql(name)}")
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    found = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE it{f'({arguments})' if arguments else ''}")
    await connection.execute("DEALLOCATE it")
    plan: dict[str, Any] = json.loads(found)[0]["Plan"]
    return plan


async def test_every_statement_touches_one_run_by_its_key(full: Connection) -> None:
    for name in names():
        if name in OF_MANY:
            continue
        for node in scans(await plan_of(full, name)):
            if node["Node Type"] == "ModifyTable":
                continue
            where = f"{name}: {node['Node Type']} of {node['Relation Name']}"
            condition = node.get("Index Cond") or node.get("Recheck Cond")
            assert condition, f"{where} uses no index"
            if node["Relation Name"] in ("run", "sidecar"):
                assert "id" in condition, where
            else:
                assert "run_id" in condition, where


async def test_the_list_of_runs_of_a_status_uses_its_index(full: Connection) -> None:
    assert await full.fetch(sql("runs"), "queued", None, None, None, None, None, 10) == []
    await full.execute("ANALYZE twiceshy.run")
    found = await full.fetchval(
        "EXPLAIN (FORMAT JSON) SELECT FROM twiceshy.run WHERE status = 'queued' ORDER BY created_at DESC LIMIT 10"
    )
    assert "run_status" in found


INDEXES: list[tuple[dict[str, Any], str]] = [
    ({}, "run_created"),
    ({"status": "ambiguous"}, "run_status"),
    ({"agent": "b"}, "run_agent"),
    ({"attributes": [("rare", "1")]}, "attribute_value"),
]


async def test_a_page_of_the_list_uses_the_index_of_its_filter(dsn: str) -> None:
    """Among 10,000 runs; behind the place of a page before it, too."""
    connection = await connect(dsn, name="test")
    await connection.execute(
        """
        INSERT INTO twiceshy.run (id, status, agent, created_at)
            SELECT 'r' || n, 'done', 'a', now() - make_interval(secs => n) FROM generate_series(1, 10000) n;
        INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
            SELECT u.id, 'of', 'many', u.created_at FROM twiceshy.run u;
        INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
            SELECT u.id, 'rare', '1', u.created_at FROM twiceshy.run u WHERE u.id LIKE 'r10_0';
        UPDATE twiceshy.run SET status = 'ambiguous', stop_message = 'x', agent = 'b' WHERE id LIKE 'r10_0';
        ANALYZE
        """
    )
    for filters, index in INDEXES:
        for cursor in (None, listing.make_cursor(datetime.now(UTC), "r5")):
            asked: list[tuple[str, Any]] = []
            with connection.query_logger(lambda logged, asked=asked: asked.append((logged.query, logged.args))):
                page = await listing.page(connection, listing.Filters(**filters), limit=5, cursor=cursor)
            assert len(page.runs) == 5
            [(query, arguments)] = [(query, arguments) for query, arguments in asked if "ORDER BY" in query]
            found = json.loads(await connection.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *arguments))
            assert index in {node.get("Index Name") for node in indexes(found[0]["Plan"])}, found
    await connection.close()


def indexes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in indexes(child))]


async def test_who_looks_for_work_does_not_see_what_is_finished(dsn: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        await connection.execute(
            """
            INSERT INTO twiceshy.run (id, agent, status, for_workers, attempt, created_at)
                SELECT 'done-' || n, 'a', 'done', true, 1, now() - make_interval(secs => n)
                FROM generate_series(1, 100000) n;
            INSERT INTO twiceshy.run (id, agent, status, for_workers, attempt, lease_expires_at)
                SELECT status || n, 'a', status, true, 1, now() + make_interval(secs => n)
                FROM generate_series(1, 200) n, unnest('{queued,running}'::text[]) status;
            INSERT INTO twiceshy.run (id, agent, status, for_workers, attempt, wake_at)
                SELECT 'parked-' || n, 'a', 'parked', true, 1, now() + make_interval(secs => n)
                FROM generate_series(1, 2000) n;
            INSERT INTO twiceshy.attempt (run_id, n, token_hash, kind, host, folder, process, counter_at)
                SELECT id, 1, '', 'worker', 'here', '/state', 'w-' || id, 0 FROM twiceshy.run;
            INSERT INTO twiceshy.start (key, run_id, digest) SELECT id, id, sha256('') FROM twiceshy.run;
            ANALYZE
            """
        )
        for name, indexes in LOOKS_FOR_WORK.items():
            plan = json.dumps(await plan_of(connection, name))
            used = set(re.findall(r'"Index Name": "([a-z_]+)"', plan))
            assert indexes & used, name
            assert used <= {*indexes, "attempt_pkey"}, name
            assert "Seq Scan" not in plan, name
    finally:
        await connection.close()


async def test_a_group_commit_reads_only_its_own_runs(journal: Journal, full: Connection) -> None:
    """What ``twiceshy.write`` does inside, told by the statistics of its transaction."""
    scenes = [await claim(journal) for _ in range(4)]
    for scene in scenes:
        await scene.step("answered", facts=PROVISIONAL)
        await scene.write(scene.read())
    exchanges = [await scene.begin("sent") for scene in scenes]
    lost = [await scene.begin("lost") for scene in scenes]
    entries: list[Any] = []
    for scene, exchange, gone in zip(scenes, exchanges, lost, strict=True):
        entries += _each_kind(scene, exchange, gone)
    batch = sorted((entry_row(entry) for entry in entries), key=lambda row: row[1])
    await full.execute("SET plan_cache_mode = DEFAULT")
    async with full.transaction():
        before = await touched(full)
        outcomes = [row["outcome"] for row in await full.fetch(sql("write"), batch)]
        after = await touched(full)
    assert outcomes.count("begun") == 8
    assert outcomes.count("recorded") == 20
    for table, (sequential, fetched) in after.items():
        assert sequential == before[table][0], table
        assert fetched - before[table][1] <= 8 * len(entries), table
    assert after["step"][1] > before["step"][1]


async def test_a_plan_made_while_the_tables_were_small_would_stay(dsn: str, scene: Scene) -> None:
    """So it must not be a sequential scan either."""
    await scene.step("answered", facts=PROVISIONAL)
    exchange, gone = await scene.begin("sent"), await scene.begin("lost")
    connection = await connect(dsn, name="test")
    try:
        await connection.execute("ANALYZE")
        batch = [entry_row(entry) for entry in _each_kind(scene, exchange, gone)]
        async with connection.transaction():
            before = await touched(connection)
            await connection.fetch(sql("write"), batch)
            after = await touched(connection)
        assert {table: scans for table, (scans, _) in after.items() if scans != before[table][0]} == {}
    finally:
        await connection.close()


async def touched(connection: Connection) -> dict[str, tuple[int, int]]:
    """Of each table: sequential scans, and rows fetched by an index."""
    found = await connection.fetch(
        "SELECT relname, seq_scan, coalesce(idx_tup_fetch, 0) AS fetched FROM pg_stat_xact_user_tables "
        "WHERE schemaname = 'twiceshy'"
    )
    return {row["relname"]: (row["seq_scan"], row["fetched"]) for row in found}


def _each_kind(scene: Scene, exchange: Any, gone: Any) -> list[Any]:
    return [
        scene.intent("new"),
        scene.intent("answered", place=1),
        scene.answer(exchange, key="sent"),
        scene.answer(exchange, key="sent"),
        scene.read(key="another"),
        scene.read(answer(b"more"), place=1),
        scene.intent("sent"),
        PutBack(scene.run_id, "sent", gone),
        scene.stop(gone, "lost"),
    ]


async def test_all_statements_are_used_and_fit_the_schema(full: Connection) -> None:
    from pathlib import Path

    code = "\n".join(path.read_text() for path in Path(database.__file__).parent.rglob("*.py"))
    used = set(re.findall(r'sql\("([a-z_]+)"\)', code))
    assert used == set(database._statements())
    for name in used - {"migration_schema", "migration_table"}:
        await full.prepare(sql(name))
    assert runs.RUN_ID.fullmatch("other-1")
