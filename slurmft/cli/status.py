"""Shows one run in full, and what to type next. This is its state and the reason, settings, hosts,
progress, speed, metrics, checkpoints, history, warnings and failures.

examples:
  slurmft status                           the newest of your runs
  slurmft status emotion-20261120          first letters of its name, where only one begins so
  slurmft status 8123 --json               by its job's id, for programs
"""

import contextlib
from datetime import datetime
from typing import Any

from slurmft.cli import next_commands
from slurmft.cli.parser import Parser, print_json
from slurmft.cluster import cost
from slurmft.cluster.status import note, run_facts
from slurmft.core import fingerprint
from slurmft.core.errors import Exit
from slurmft.core.files import fits
from slurmft.core.run_files import Transition
from slurmft.core.text import ago, brief, clock, duration, hanging, in_bytes, number, some
from slurmft.runs import resolve
from slurmft.runs.progress import metrics_words, result_table

_HISTORY_SHOWN = 12
_WARNINGS_SHOWN = 5


# --- for people -----------------------------------------------------------------------------------


def text(facts: dict[str, Any]) -> str:
    """A run in full, as lines."""
    what = (facts["task"], facts["data"], facts["model"], f"{facts['nodes']} node(s)")
    changed = facts["changed"]
    rows = [
        ("state", state_words(facts)),
        ("what", ", ".join(filter(None, what))),
        ("code", _code(facts["submission"].get("snapshot"))),
        ("where", _where(facts)),
        ("submitted", _submitted(facts)),
        ("changed", f"since submission: {fingerprint.words(changed)}" if changed else ""),
        ("progress", progress_words(facts)),
        ("speed", _speed(facts)),
        ("metrics", metrics_words(facts["metrics"])),
        ("cost", cost.words(facts["cost"]) if facts["cost"]["node_hours"] else ""),
        ("advice", facts["cost"]["advice"]),
        ("checkpoints", _checkpoints(facts["checkpoints"])),
        ("model", facts["model_path"] or ""),
        ("logs", facts["logs"]),
    ]
    lines = [facts["path"]]
    lines += [hanging(f"  {name:<12} ", value, 15) for name, value in rows if value]
    lines += _history(facts["history"])
    lines += _section("warnings", facts["warnings"][-_WARNINGS_SHOWN:])
    failures = [
        f"{each['message']} ({each['where']}), attempt {each['attempt']}"
        for each in facts["failures"]
    ]
    lines += _section("failures", failures[-_WARNINGS_SHOWN:])
    if facts["state"] == "finished":
        lines.append(result_table(facts["result"]))
    return "\n".join(lines)


def state_words(facts: dict[str, Any]) -> str:
    """ "requeued: BeginTime; starts about 2026-11-22 14:05:00; requeued 2 times" """
    notes = brief(note(facts))
    return f"{facts['state']}: {notes}" if notes else str(facts["state"])


def progress_words(facts: dict[str, Any]) -> str:
    """ "step 120/500 (24 %), epoch 0.24, loss 0.4312" """
    done, total = facts["steps_done"], facts["steps_total"]
    if done is None or not total:
        return ""
    words = [f"step {done}/{total} ({100 * done // total} %)"]
    if facts["epoch"] is not None:
        words.append(f"epoch {facts['epoch']:.2f}")
    if facts["loss"] is not None:
        words.append(f"loss {number(facts['loss'])}")
    if facts.get("evaluating"):
        words.append("evaluating {}/{} samples".format(*facts["evaluating"]))
    return ", ".join(words)


def _speed(facts: dict[str, Any]) -> str:
    words = []
    if facts["samples_per_s"] is not None:
        words.append(f"{facts['samples_per_s']:,.0f} samples/s")
    if facts["left_s"]:
        words.append(f"{duration(facts['left_s'])} left")
    if facts["last_record"] and facts["state"] in ("running", "stopping"):
        words.append(f"last record {ago(facts['last_record'])}")
    return ", ".join(words)


def _code(snapshot: Any) -> str:
    """ "git 0a1b2c3, 2 files changed; its copy runs" """
    if not fits(snapshot, {"mode": str, "files": int, "commit?": (str, None), "changed?": int}):
        return ""
    changed = f", {n} file(s) changed" if (n := snapshot.get("changed")) else ""
    commit = f"git {(snapshot.get('commit') or 'no commit')[:9]}{changed}"
    what = commit if snapshot["mode"] == "git" else f"{snapshot['files']} file(s)"
    return f"{what}, as it was at submission"


def _where(facts: dict[str, Any]) -> str:
    if not facts["job"]:
        return ""
    hosts = f", on {some(facts['hosts'])}" if facts["hosts"] else ""
    cluster = " ".join(filter(None, (facts["cluster"], facts["where"])))
    return f"job {facts['job']} ({cluster}){hosts}"


def _submitted(facts: dict[str, Any]) -> str:
    submission = facts["submission"]
    with contextlib.suppress(KeyError, ValueError):
        when = clock(datetime.fromisoformat(submission["time"]).timestamp())
        who = f"{submission['user']} on {submission['host']}"
        return f"{when} by {who}: {submission['command']}"
    return ""


def _checkpoints(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    newest = found[-1]
    total = sum(each["bytes"] for each in found)
    return f"{newest['name']}, {ago(newest['time'])}; {len(found)} in all, {in_bytes(total)}"


def _history(history: list[Transition]) -> list[str]:
    lines, shown = [], history[-_HISTORY_SHOWN:]
    for each in shown:
        code = f" (exit code {each.exit_code})" if each.exit_code else ""
        reason = f": {brief(each.reason)}" if each.reason else ""
        lines.append(f"{clock(each.time)}  {each.state}{reason}{code}")
    more = f" ({len(history) - len(shown)} before)" if len(history) > len(shown) else ""
    return _section(f"history{more}", lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(hanging("  ", line) for line in lines)] if lines else []


_NEXT: dict[str, tuple[str, ...]] = {
    "running": ("follow", "watch", "logs", "cancel"),
    "finished": ("report",),
    **dict.fromkeys(("failed", "cancelled", "vanished"), ("logs", "resume", "follow")),
}
"""State -> the commands that make sense for a run; of other states, those of a running one."""


def parser() -> Parser:
    return Parser("slurmft status", __doc__).add_run(default=resolve.LAST).add_json()


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    facts = run_facts(run)
    if arguments.json:
        return print_json(facts)
    print(text(facts))
    print(next_commands(run.path, _NEXT.get(facts["state"], _NEXT["running"])))
    return Exit.OK
