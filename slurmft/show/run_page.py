"""The page of `slurmft status`: one run in full."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.decode import decode_or_none
from slurmft.core.run_files import Transition
from slurmft.core.text import ago, brief, clock, duration, hanging, in_bytes, some
from slurmft.show import costs
from slurmft.show.progress import metrics_words
from slurmft.show.result_table import result_table
from slurmft.show.status_words import progress_words, state_words

_HISTORY_LINES = 12
_SECTION_LINES = 5


def text(facts: dict[str, Any]) -> str:
    """Returns a run in full, as lines. `facts`: see `slurmft.cluster.status.run_facts`."""
    what = (facts["task"], facts["data"], facts["model"], f"{facts['nodes']} node(s)")
    changed = facts["changed"]
    rows = [
        ("state", state_words(facts)),
        ("what", ", ".join(filter(None, what))),
        ("code", _code(facts["submission"].get("snapshot"))),
        ("where", _where(facts)),
        ("submitted", _submitted(facts["submission"])),
        ("changed", f"since submission: {fingerprint.words(changed)}" if changed else ""),
        ("progress", progress_words(facts)),
        ("speed", _speed(facts)),
        ("metrics", metrics_words(facts["metrics"])),
        ("cost", costs.words(facts["cost"]) if facts["cost"]["node_hours"] else ""),
        ("advice", facts["cost"]["advice"]),
        ("checkpoints", _checkpoints(facts["checkpoints"])),
        ("model", facts["model_path"] or ""),
        ("logs", facts["logs"]),
    ]
    lines = [facts["path"]]
    lines += [hanging(f"  {name:<12} ", value, 15) for name, value in rows if value]
    lines += _history(facts["history"])
    lines += _section("warnings", facts["warnings"][-_SECTION_LINES:])
    failures = [
        f"{each['message']} ({each['where']}), attempt {each['attempt']}"
        for each in facts["failures"]
    ]
    lines += _section("failures", failures[-_SECTION_LINES:])
    if facts["state"] == "finished":
        lines.append(result_table(facts["result"]))
    return "\n".join(lines)


def _speed(facts: dict[str, Any]) -> str:
    parts = []
    if facts["samples_per_s"] is not None:
        parts.append(f"{facts['samples_per_s']:,.0f} samples/s")
    if facts["left_s"]:
        parts.append(f"{duration(facts['left_s'])} left")
    if facts["last_record"] and facts["state"] in ("running", "stopping"):
        parts.append(f"last record {ago(facts['last_record'])}")
    return ", ".join(parts)


@dataclass(frozen=True)
class _Snapshot:
    """The copy of the program's code, as far as its line needs it."""

    mode: str
    files: int
    commit: str | None = None
    changed: int = 0


def _code(raw_snapshot: Any) -> str:
    """ "git 0a1b2c3, 2 file(s) changed, as it was at submission" """
    snapshot = decode_or_none(raw_snapshot, _Snapshot)
    if snapshot is None:
        return ""
    what = f"{snapshot.files} file(s)"
    if snapshot.mode == "git":
        what = f"git {(snapshot.commit or 'no commit')[:9]}"
        if snapshot.changed:
            what += f", {snapshot.changed} file(s) changed"
    return f"{what}, as it was at submission"


def _where(facts: dict[str, Any]) -> str:
    if not facts["job"]:
        return ""
    hosts = f", on {some(facts['hosts'])}" if facts["hosts"] else ""
    cluster = " ".join(filter(None, (facts["cluster"], facts["where"])))
    return f"job {facts['job']} ({cluster}){hosts}"


def _submitted(submission: dict[str, Any]) -> str:
    with contextlib.suppress(KeyError, ValueError):
        when = clock(datetime.fromisoformat(submission["time"]).timestamp())
        who = f"{submission['user']} on {submission['host']}"
        return f"{when} by {who}: {submission['command']}"
    return ""


def _checkpoints(checkpoints: Sequence[dict[str, Any]]) -> str:
    if not checkpoints:
        return ""
    newest = checkpoints[-1]
    total_bytes = sum(each["bytes"] for each in checkpoints)
    count = f"{len(checkpoints)} in all, {in_bytes(total_bytes)}"
    return f"{newest['name']}, {ago(newest['time'])}; {count}"


def _history(history: Sequence[Transition]) -> list[str]:
    lines = []
    for transition in history[-_HISTORY_LINES:]:
        line = f"{clock(transition.time)}  {transition.state}"
        if transition.reason:
            line += f": {brief(transition.reason)}"
        if transition.exit_code:
            line += f" (exit code {transition.exit_code})"
        lines.append(line)
    earlier = len(history) - len(lines)
    return _section(f"history ({earlier} before)" if earlier else "history", lines)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [title, *(hanging("  ", line) for line in lines)]
