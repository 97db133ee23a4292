"""The page of `slurmft status`: one run in full."""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.decode import decode_or_none
from slurmft.core.run_files import Snapshot, Transition
from slurmft.core.text import (
    after_state,
    ago,
    brief,
    clock,
    counted,
    duration,
    hanging,
    in_bytes,
    some,
)
from slurmft.show import costs, time_use
from slurmft.show.progress import metrics_words
from slurmft.show.result_table import result_table
from slurmft.show.status_words import progress_words, state_words, waiting_advice

_HISTORY_LINES = 12
_SECTION_LINES = 5


def text(facts: Mapping[str, Any]) -> str:
    """Returns a run in full, as lines. `facts`: see `slurmft.cluster.facts.run_facts`."""
    # A program of the user's own has neither data nor model.
    nodes = f"{facts['nodes']} node(s)"
    what = (facts["task"], facts["data"], facts["model"], nodes)
    changed = ""
    if facts["changed"]:
        changes = fingerprint.words(facts["changed"])
        changed = f"since submission: {changes}"
    cost = facts["cost"]
    cost_words = ""
    # There are none before the job has started.
    if cost["node_hours"]:
        cost_words = costs.words(cost)
    submission = facts["submission"]
    rows = [
        ("state", state_words(facts)),
        ("disk", _disk(facts["disk"])),
        ("start", waiting_advice(facts)),
        *(("queue", line) for line in facts["queue"]),
        ("what", ", ".join(part for part in what if part)),
        ("code", _code(submission.get("snapshot"))),
        ("where", _where(facts)),
        ("submitted", _submitted(submission)),
        ("from", _origin(facts["origin"])),
        ("changed", changed),
        ("progress", progress_words(facts)),
        ("speed", _speed(facts)),
        ("metrics", metrics_words(facts["metrics"])),
        ("time", time_use.words(facts["time_use"])),
        ("cost", cost_words),
        ("advice", cost["advice"]),
        ("checkpoints", _checkpoints(facts["checkpoints"])),
        ("model", facts["model_path"] or ""),
        ("logs", facts["logs"]),
    ]
    lines = [facts["path"]]
    for name, value in rows:
        # What is not known, or does not apply, has no row.
        if value:
            head = f"  {name:<12} "
            lines.append(hanging(head, value, len(head)))
    lines += _attempts(facts["time_use"])
    lines += _history(facts["history"])
    # The newest alone, so that a page stays one; --json has them all.
    newest_warnings = facts["warnings"][-_SECTION_LINES:]
    lines += _section("warnings", newest_warnings)
    failures = []
    newest_failures = facts["failures"][-_SECTION_LINES:]
    for failure in newest_failures:
        message = failure["message"]
        where = failure["where"]
        attempt = failure["attempt"]
        failures.append(f"{message} ({where}), attempt {attempt}")
    lines += _section("failures", failures)
    if facts["state"] == "finished":
        lines.append(result_table(facts["result"]))
    return "\n".join(lines)


def _disk(full: str | None) -> str:
    if full is None:
        return ""
    return (
        f"{full}: the run can record nothing, and what is shown here may be old; slurmft clean "
        "shows what nobody needs"
    )


def _origin(origin: dict[str, Any] | None) -> str:
    if origin is None:
        return ""
    owner = origin["owner"] or "an unknown user"
    text = f"{origin['cluster']}, of {owner} there; fetched {ago(origin['time'])}"
    if origin["accepted"]:
        text += f"; may execute {', '.join(origin['accepted'])}"
    return text


def _speed(facts: Mapping[str, Any]) -> str:
    parts = []
    samples_per_s = facts["samples_per_s"]
    if samples_per_s is not None:
        parts.append(f"{samples_per_s:,.0f} samples/s")
    left_s = facts["left_s"]
    if left_s:
        parts.append(f"{duration(left_s)} left")
    last_record = facts["last_record"]
    # Of a run that has ended, it would be no news.
    is_active = facts["state"] in ("running", "stopping")
    if last_record and is_active:
        parts.append(f"last record {ago(last_record)}")
    return ", ".join(parts)


def _code(raw_snapshot: Any) -> str:
    """ "git 0a1b2c3, 2 files changed, as it was at submission" """
    snapshot = decode_or_none(raw_snapshot, Snapshot)
    if snapshot is None:
        return ""
    what = counted(snapshot.files, "file")
    if snapshot.mode == "git":
        # A work tree may have no commit yet: nine characters, as those of an id that are shown.
        commit = snapshot.commit or "no commit"
        what = f"git {commit[:9]}"
        if snapshot.changed:
            what += f", {counted(snapshot.changed, 'file')} changed"
    return f"{what}, as it was at submission"


def _where(facts: Mapping[str, Any]) -> str:
    if not facts["job"]:
        return ""
    cluster = facts["cluster"]
    # The cluster's own name, or the host: several of a kind may see the run.
    if facts["where"]:
        cluster = f"{cluster} {facts['where']}"
    text = f"job {facts['job']} ({cluster})"
    hosts = facts["hosts"]
    if hosts:
        text += f", on {some(hosts)}"
    return text


def _submitted(submission: dict[str, Any]) -> str:
    # Any process may have written the configuration: the line is left out where it lacks a part.
    with contextlib.suppress(KeyError, ValueError):
        submitted_at = datetime.fromisoformat(submission["time"])
        # The record is in UTC, all times on this page are local.
        when = clock(submitted_at.timestamp())
        who = f"{submission['user']} on {submission['host']}"
        command = submission["command"]
        return f"{when} by {who}: {command}"
    return ""


def _checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    if not checkpoints:
        return ""
    newest = checkpoints[-1]
    total_bytes = sum(each["bytes"] for each in checkpoints)
    count = f"{len(checkpoints)} in all, {in_bytes(total_bytes)}"
    written = ago(newest["time"])
    return f"{newest['name']}, {written}; {count}"


def _attempts(use: Mapping[str, Any]) -> list[str]:
    """Returns where the time of each attempt went; of a single one, the row in all says it."""
    newest = use["attempts"][-_HISTORY_LINES:]
    if len(use["attempts"]) < 2:
        return []
    names = [str(each["attempt"]) for each in newest]
    return _section("where the time went", time_use.table("attempt", names, newest))


def _history(history: Sequence[Transition]) -> list[str]:
    lines = []
    # The newest: they tell how the run came to its state.
    for transition in history[-_HISTORY_LINES:]:
        when = clock(transition.time)
        line = f"{when}  {transition.word}"
        reason = after_state(transition.reason, transition.word)
        if reason:
            line += f": {brief(reason)}"
        # 0 is success, which the state says; None is of states that are no end.
        # A reason may end with it.
        code = f"exit code {transition.exit_code}"
        if transition.exit_code and code not in line:
            line += f" ({code})"
        lines.append(line)
    title = "history"
    earlier = len(history) - len(lines)
    if earlier:
        title += f" ({earlier} before)"
    return _section(title, lines)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    wrapped = [hanging("  ", line) for line in lines]
    return [title, *wrapped]
