"""`slurmft status`: one run in full; and the facts of a run that `slurmft list` shows, too."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import Any

from slurmft import latest, selection, standing
from slurmft.cli import Parser, shown
from slurmft.errors import Exit
from slurmft.follow import next_commands
from slurmft.latest import Latest
from slurmft.progress import duration, number, result_table
from slurmft.rundir import RunDir, to_json
from slurmft.runs import MeasuredRun
from slurmft.standing import Standing

EXAMPLES = """\
examples:
  slurmft status                           the newest of your runs
  slurmft status emotion-20261120          first letters of its name, where only one begins so
  slurmft status 8123 --json               by its job's id, for programs
"""

_HISTORY_SHOWN = 12
_WARNINGS_SHOWN = 5


def summary(found: Standing, said: Latest | None = None) -> dict[str, Any]:
    """A run as `slurmft list --json` prints it.

    Returns:
        name, path, user, task, model, nodes, submitted (ISO time), cluster (slurm, local, ...),
        where (the Slurm cluster's name, or the host), job, state (one of standing.STATES), reason,
        expected_start (local time), requeues, steps_done, steps_total, epoch, samples_per_s, left_s
        (seconds of training), loss, metrics (of the last evaluation). None is what is not known.
    """
    run = found.run
    submission = run.config["submission"]
    return {
        "name": run.name,
        "path": str(run.path),
        "user": submission.get("user"),
        "task": run.value("task"),
        "model": run.value("model"),
        "nodes": run.value("nodes"),
        "submitted": submission.get("time"),
        "cluster": found.cluster or None,
        "where": found.where or None,
        "job": found.job or None,
        "state": found.state,
        "reason": found.reason,
        "expected_start": found.expected_start or None,
        "requeues": found.requeues,
    } | _progress(found, said)


def _progress(found: Standing, said: Latest | None) -> dict[str, Any]:
    """How far a run is: a finished one by its result, others by their last words."""
    result = found.run.result
    if found.state == "finished" and result is not None:
        steps, epochs = result["steps"], found.run.value("epochs")
        return {
            "steps_done": steps,
            "steps_total": result.get("total_steps", steps),
            "epoch": epochs,
            "samples_per_s": result.get("train_samples_per_s"),
            "left_s": 0.0,
            "loss": result.get("loss"),
            "metrics": result["metrics"],
        }
    said = said or latest.read(found.run.path)
    return {
        "steps_done": said.step,
        "steps_total": said.total_steps,
        "epoch": said.epoch,
        "samples_per_s": said.samples_per_s,
        "left_s": said.left_s if found.is_alive else None,
        "loss": said.loss,
        "metrics": said.metrics,
    }


def describe(run: RunDir) -> dict[str, Any]:
    """All that is known of a run, as `slurmft status --json` prints it.

    Returns:
        What `summary` returns, and: train, job_options (the configuration), submission, hosts,
        history (a list of state, time, reason, exit_code), attempts, last_record (Unix seconds),
        evaluating (samples done and in all), checkpoints (a list of name, bytes, time), warnings,
        failures (a list of where, message, hint, attempt, time), result, model_path, logs.

    Raises:
        UsageError: its files cannot be read.
    """
    found = standing.stand([MeasuredRun.read(run.path)])[0]
    said = latest.read(run.path)
    return summary(found, said) | {
        "train": found.run.config["train"],
        "job_options": found.run.config["job"],
        "submission": found.run.config["submission"],
        "hosts": found.run.hosts,
        "history": found.run.state.get("history", []),
        "attempts": run.attempt_number(),
        "last_record": said.time,
        "evaluating": said.evaluating,
        "checkpoints": checkpoints(run),
        "warnings": [str(r.get("text")) for r in found.run.records("warning")],
        "failures": [_failure(f) for f in run.all_failures() if not f["echo"]],
        "result": found.run.result,
        "model_path": str(run.model) if run.model.is_dir() else None,
        "logs": str(run.logs),
    }


def _failure(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found.get(key) for key in ("where", "message", "hint", "attempt", "time")}


def checkpoints(run: RunDir) -> list[dict[str, Any]]:
    """The checkpoints, oldest first: name, bytes, time (Unix seconds)."""
    found = []
    for name in run.checkpoint_names():
        with contextlib.suppress(OSError):  # one that is just being removed
            path = run.checkpoints / name
            size = sum(file.stat().st_size for file in path.rglob("*"))
            found.append({"name": name, "bytes": size, "time": path.stat().st_mtime})
    return found


# --- for people -----------------------------------------------------------------------------------


def text(facts: dict[str, Any]) -> str:
    """A run in full, as lines."""
    rows = [
        ("state", state_words(facts)),
        ("what", _what(facts)),
        ("where", _where(facts)),
        ("submitted", _submitted(facts)),
        ("progress", progress_words(facts)),
        ("speed", _speed(facts)),
        ("metrics", metrics_words(facts["metrics"])),
        ("checkpoints", _checkpoints(facts["checkpoints"])),
        ("model", facts["model_path"] or ""),
        ("logs", facts["logs"]),
    ]
    lines = [facts["path"], *(f"  {name:<12} {value}" for name, value in rows if value)]
    lines += _history(facts["history"])
    lines += _section("warnings", facts["warnings"][-_WARNINGS_SHOWN:])
    told = [f"attempt {f['attempt']}, {f['where']}: {f['message']}" for f in facts["failures"]]
    lines += _section("failures", told[-_WARNINGS_SHOWN:])
    if facts["state"] == "finished":
        lines.append(result_table(facts["result"]))
    return "\n".join(lines)


def state_words(facts: dict[str, Any]) -> str:
    """ "requeued: BeginTime; starts about 2026-11-22 14:05:00; requeued 2 times" """
    notes = note(facts)
    return f"{facts['state']}: {notes}" if notes else str(facts["state"])


def note(facts: dict[str, Any]) -> str:
    """What is to be said of a state: why it is so, when it starts, how often it was requeued."""
    reason = str(facts["reason"]).removeprefix(f"{facts['state']}: ")
    words = [] if reason == facts["state"] or facts["state"] == "finished" else [reason]
    if facts["expected_start"]:
        words.append(f"starts about {facts['expected_start'].replace('T', ' ')}")
    if count := facts["requeues"]:
        words.append("requeued once" if count == 1 else f"requeued {count} times")
    return "; ".join(filter(None, words))


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


def metrics_words(metrics: dict[str, Any] | None) -> str:
    """ "accuracy 0.9123  f1 0.8870" """
    return "  ".join(f"{name} {number(value)}" for name, value in (metrics or {}).items())


def _speed(facts: dict[str, Any]) -> str:
    words = []
    if facts["samples_per_s"] is not None:
        words.append(f"{facts['samples_per_s']:,.0f} samples/s")
    if facts["left_s"]:
        words.append(f"{duration(facts['left_s'])} left")
    if facts["last_record"] and facts["state"] in ("running", "stopping"):
        words.append(f"last record {ago(facts['last_record'])}")
    return ", ".join(words)


def _what(facts: dict[str, Any]) -> str:
    return ", ".join(filter(None, (facts["task"], facts["model"], f"{facts['nodes']} node(s)")))


def _where(facts: dict[str, Any]) -> str:
    if not facts["job"]:
        return ""
    hosts = f", on {', '.join(facts['hosts'])}" if facts["hosts"] else ""
    cluster = " ".join(filter(None, (facts["cluster"], facts["where"])))
    return shown(f"job {facts['job']} ({cluster}){hosts}", 100)


def _submitted(facts: dict[str, Any]) -> str:
    told = facts["submission"]
    with contextlib.suppress(KeyError, ValueError):
        when = clock(datetime.fromisoformat(told["time"]).timestamp())
        return f"{when} by {told['user']} on {told['host']}: {shown(told['command'], 80)}"
    return ""


def _checkpoints(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    newest = found[-1]
    total = sum(each["bytes"] for each in found)
    return f"{newest['name']}, {ago(newest['time'])}; {len(found)} in all, {size(total)}"


def _history(history: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in history[-_HISTORY_SHOWN:]:
        code = f" (exit code {each['exit_code']})" if each.get("exit_code") else ""
        reason = f": {shown(each['reason'], 80)}" if each.get("reason") else ""
        lines.append(f"{clock(each['time'])}  {each['state']}{reason}{code}")
    more = len(history) - len(lines)
    return _section("history" + (f" ({more} before)" if more else ""), lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {shown(line, 120)}" for line in lines)] if lines else []


def clock(seconds: float) -> str:
    """Unix seconds as local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def ago(seconds: float) -> str:
    """How long ago a time (Unix seconds) is."""
    return f"{duration(max(0.0, time.time() - seconds))} ago"


def size(count: float) -> str:
    """Bytes for people: 512 bytes, 1.5 MiB"""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def next_of(state: str) -> tuple[str, ...]:
    """The commands that make sense for a run in a state."""
    if state == "finished":
        return ("report",)
    if state in ("failed", "cancelled", "vanished"):
        return ("logs", "resume", "follow")
    return ("follow", "watch", "logs", "cancel")


def main(argv: list[str]) -> int:
    """`slurmft status [RUN]`"""
    parser = Parser(
        prog="slurmft status",
        description="One run in full: what it is, where, how it stands and why, its history, "
        "progress, speed, metrics, checkpoints, warnings, and what to type next.",
        epilog=EXAMPLES,
    )
    selection.add_argument(parser, default=selection.LAST)
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    arguments = parser.parse(argv)
    run = selection.find(arguments.run, arguments.runs_dir)
    facts = describe(run)
    if arguments.json:
        print(to_json(facts, indent=2))
    else:
        print(text(facts))
        print(next_commands(run, next_of(facts["state"])))
    return Exit.OK
