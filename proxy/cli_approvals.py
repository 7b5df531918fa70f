"""``twiceshy approvals``, ``approve``, ``decline``: what runs wait for a person to say."""

import argparse
import json
from typing import Any

from proxy.cli_runs import connection
from runtime import approvals
from runtime.entries import Decision, Verdict
from runtime.errors import UsageError


async def listed(arguments: argparse.Namespace) -> int:
    """List what waits for a decision, the oldest first."""
    if not 0 < arguments.limit < 1 << 31:
        raise UsageError(f"--limit {arguments.limit}: a number from 1")
    async with connection() as conn:
        found = await approvals.open_ones(conn, run=arguments.run, name=arguments.name, limit=arguments.limit)
    if arguments.json:
        print(json.dumps([_as_json(each) for each in found], indent=2))
        return 0
    if not found:
        print("nothing waits for a decision")
    for each in found:
        until = f", until {each.deadline:%Y-%m-%d %H:%M:%SZ}" if each.deadline else ""
        print(f"{each.run} {each.name} ({each.id}), asked {each.asked_at:%Y-%m-%d %H:%M:%SZ}{until}")
        if each.request is not None:
            print(f"  {_short(each.request)}")
    return 0


async def approve(arguments: argparse.Namespace) -> int:
    """Let the run go on as it asked to."""
    return await _decide(arguments, "approve")


async def decline(arguments: argparse.Namespace) -> int:
    """Let it go on otherwise."""
    return await _decide(arguments, "decline")


async def _decide(arguments: argparse.Namespace, verdict: Verdict) -> int:
    async with connection() as conn:
        found = await approvals.decide(
            conn, arguments.run, arguments.name, verdict, by=arguments.by, comment=arguments.comment
        )
    if arguments.json:
        print(json.dumps({"run": arguments.run} | _decision(found)))
    else:
        print(f"run {arguments.run}: approval {found.name} ({found.id}): {found.decision}")
    return 0


def _as_json(each: approvals.Open) -> dict[str, Any]:
    return {
        "run": each.run,
        "id": each.id,
        "name": each.name,
        "request": None if each.request is None else json.loads(each.request),
        "asked_at": each.asked_at.isoformat(),
        "deadline": each.deadline and each.deadline.isoformat(),
    }


def _decision(found: Decision) -> dict[str, Any]:
    said = {name: getattr(found, name) for name in ("id", "name", "decision", "by", "comment")}
    return said | {"at": found.at.isoformat()}


def _short(request: bytes) -> str:
    """On one line, and nothing that moves a cursor."""
    text = json.dumps(json.loads(request), ensure_ascii=True)
    return text if len(text) <= 200 else f"{text[:200]}…"
