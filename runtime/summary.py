"""A run's summary in words, line by line: what became of it, what to know of it, what a person must do. Pure."""

import shlex
from collections.abc import Sequence
from datetime import datetime

from runtime.names import shortened
from runtime.step import Finality, RunStatus, State
from runtime.tape import Tape, moment, some

#: How many hosts whose requests are in no journal are named.
_HOSTS = 10
#: How many steps by which a run failed are told of, the last ones.
_FAILURES = 3


def summary(tape: Tape) -> list[str]:
    """What a person wants to know at the end, line by line."""
    counts = tape.counts
    restarts = [attempt.outcome for attempt in tape.attempts if attempt.outcome not in (None, "done")]
    how = f" ({', '.join(str(outcome).replace('_', ' ') for outcome in restarts[-6:])})" if restarts else ""
    line = f"run {tape.run} {tape.status} · {some(len(tape.attempts), 'attempt')}{how}"
    line += f" · {counts.live:,} live, {counts.replayed:,} replayed, {counts.joined:,} joined"
    if counts.calls_saved or counts.tokens_saved:
        line += f" · saved {some(counts.calls_saved, 'LLM call')}, {some(counts.tokens_saved, 'token')}"
    if counts.drift:
        line += f" · drift {counts.drift:,}"
    lines = [line]
    if tape.status is RunStatus.PARKED:
        lines.append(f"parked: it waits {until(tape.wake_at, tape.wake_on)}")
    if tape.continued_as is not None:
        lines.append(f"continued: it goes on as run {tape.continued_as}")
    if tape.error and tape.status is RunStatus.FAILED:
        lines.append(f"failed: {tape.error}")
        lines += [
            f"  step {n}, {step.shown}: {shortened(_line(step.error), 500)}"
            for n, step in enumerate(tape.steps, 1)
            if step.error is not None
        ][-_FAILURES:]
    if tape.status is RunStatus.DONE:
        lines += [
            f"unsure: {step.method} {step.url} was answered {step.statuses[-1]}: whether it was done is not known"
            f" (step {step.key})"
            for step in tape.steps
            if step.finality is Finality.DOUBTFUL and step.state is State.ANSWERED and step.statuses
        ]
    return lines + needs_to_know(tape) + needs_a_person(tape)


def _line(text: str) -> str:
    """What an agent wrote, on one line, and nothing that moves a terminal's cursor."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def until(wake_at: datetime | None, wake_on: Sequence[str]) -> str:
    """Until when, or for what, a parked run waits."""
    what = [] if wake_at is None else [f"until {moment(wake_at)}"]
    for kind, one, many in _AWAITED:
        names = [name.rpartition(":")[2] for name in wake_on if name.rpartition(":")[0] == kind]
        if names:
            what.append(f"for {many if len(names) > 1 else one} {', '.join(names)}")
    return " or ".join(what) or "for nothing"


#: What stands before the colon in ``wake_on`` (twiceshy.awaited), and the words for one such and for several.
_AWAITED = (
    ("", "the event", "one of the events"),
    ("approval", "the approval", "one of the approvals"),
    ("run", "the end of run", "the end of one of the runs"),
)


def needs_to_know(tape: Tape) -> list[str]:
    """What did not come through the sidecar as it should, with the attempts that it happened in."""
    told: dict[str, list[int]] = {}
    for attempt in tape.attempts:
        for hint in attempt.hints:
            told.setdefault(hint, []).append(attempt.n)
    notes = [
        f"note: {hint} (attempt{'' if len(ns) == 1 else 's'} {', '.join(map(str, ns[-6:]))})"
        for hint, ns in told.items()
    ]
    return notes + _unjournalled(tape)


def _unjournalled(tape: Tape) -> list[str]:
    """What passed through as it came, all attempts together, in a line."""
    hosts: dict[str, dict[str, int]] = {}
    for attempt in tape.attempts:
        for host, passed in attempt.unjournalled.items():
            counts = hosts.setdefault(host, {})
            for kind, n in passed.items():
                counts[kind] = counts.get(kind, 0) + n
    shown = [
        # A host is what a client said: nothing that moves a terminal's cursor, and no book.
        f"{ascii(host)[1:-1][:200]} ({', '.join(some(n, kind) for kind, n in counts.items())})"
        for host, counts in list(hosts.items())[:_HOSTS]
    ]
    if len(hosts) > _HOSTS:
        shown.append(f"and {some(len(hosts) - _HOSTS, 'host')} more")
    return [f"unjournalled: {', '.join(shown)}"] if shown else []


def needs_a_person(tape: Tape) -> list[str]:
    """Why the run stopped and the exact commands that settle it. Empty when it did not."""
    if not tape.status.stopped:
        return []
    lines = [f"needs a person: {tape.status}: {tape.stop_message or 'no reason was recorded'}"]
    for step in tape.steps:
        if step.state is not State.AMBIGUOUS:
            continue
        answers = f", answered {step.statuses[-1]}" if step.statuses else ""
        evidence = f" ({step.evidence})" if step.evidence else ""
        lines.append(f"  {step.shown}: it is not known whether this was done{answers}{evidence}")
        lines.append(f"    it was done:      {settle(tape.run, step.key, 'assume_done')}")
        lines.append("                      (with --status, --header, --body: the answer that the agent is to get)")
        lines.append(f"    it was not done:  {settle(tape.run, step.key, 'send_again')}")
    return lines


def settle(run: str, key: str, how: str) -> str:
    """The command that settles a step. An explicit key may hold what a shell would take apart."""
    return shlex.join(["twiceshy", "resolve", run, key, how])
