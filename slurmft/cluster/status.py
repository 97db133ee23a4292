"""`slurmft status`: one run in full; and the facts of a run that `slurmft list` shows, too."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.cluster import launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import JobState
from slurmft.core.files import read_json
from slurmft.core.text import number
from slurmft.runs import records, resolve
from slurmft.runs.records import Latest
from slurmft.runs.resolve import read_all
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun


def take(top: Path, states: Sequence[str] = (), newest: int | None = None) -> dict[str, Any]:
    """The runs in a folder, as `slurmft list --json` prints them.

    Args:
        top: the folder.
        states: states to show; all of them, if none is given.
        newest: how many to show at most.

    Returns:
        runs_dir; runs: a list of what `status.summary` returns, oldest first; problems: a line for
        everything that could not be read.

    Raises:
        UsageError: there is no such folder.
    """
    made, problems = read_all(resolve.look(top))
    every = [s for s in stand(made) if not states or s.state in states]
    kept = every[-newest:] if newest else every
    return {
        "runs_dir": str(top),
        "runs": [summary(each) for each in kept],
        "problems": problems,
    }


STATES = (
    "pending", "requeued", "running", "stopping", "finished", "failed", "cancelled", "vanished",
)  # fmt: skip
"""pending: the job waits, or there is none yet. requeued: it ran, and waits to go on. stopping: the
ranks save. vanished: the job is gone, and the run never said that it ended."""

_OUTCOMES = {
    "pending": "pending", "requeued": "pending", "running": "running", "stopping": "running",
    "finished": "finished", "failed": "failed", "cancelled": "failed", "vanished": "failed",
}  # fmt: skip

_REQUEUED = ("PREEMPTED", "NODE_FAIL", "REQUEUED")
"""What the controller calls a job for a moment before it queues it again."""

_NO_ANSWER = "Slurm gives no answer"


@dataclass(frozen=True, slots=True)
class Standing:
    """How one run stands."""

    run: MeasuredRun
    state: str
    """One of STATES."""
    reason: str = ""
    """Why it waits, failed or was cancelled: Slurm's words, or its own."""
    cluster: str = ""
    job: str = ""
    """Its job's id; "" before there is one."""
    where: str = ""
    """The name of its Slurm cluster, or its host; "" where that is not recorded."""
    apart: str = ""
    """That its job is not here, in words: it cannot be asked or ended from here."""
    expected_start: str = ""
    """When Slurm thinks that a pending job starts: local time, 2026-11-22T14:05:00; "": unknown."""
    has_started: bool = True
    is_sure: bool = True
    """Whether the cluster was asked and answered, where that matters; not of one elsewhere."""

    @property
    def outcome(self) -> str:
        """finished, running, pending or failed."""
        return _OUTCOMES[self.state]

    @property
    def is_alive(self) -> bool:
        """Whether its job waits or runs, or has yet to be submitted."""
        return self.outcome in ("running", "pending")

    @property
    def requeues(self) -> int:
        """How often its job was queued again, since the run was last submitted."""
        past: list[dict[str, Any]] = self.run.state.get("history", [])
        since = max((i for i, h in enumerate(past) if h["state"] == "submitted"), default=0)
        starts = len([h for h in past[since:] if h["state"] == "running"])
        avoided = len([h for h in past[since:] if h.get("avoided")])
        waits = int(starts > 0 and self.state == "requeued")
        return max(0, starts - 1) + avoided + waits


def stand(found: Iterable[MeasuredRun]) -> list[Standing]:
    """How runs stand, by their own records and, where these do not say the end, their jobs'."""
    every = _with_places([_base(run) for run in found])
    open_ = [s for s in every if s.state != "finished" and s.cluster == "slurm" and not s.apart]
    asked = {s.job: s.run for s in open_ if s.job}
    ended = [job for job, run in asked.items() if run.has_ended]
    states = commands.job_states(asked, only_queued=ended)
    return [_stand(each, states) for each in every]


def _base(run: MeasuredRun) -> Standing:
    """What is known of a run before its job is asked for."""
    cluster, job, where = job_of(run)
    base = Standing(run, "finished", cluster=cluster, job=job, where=where)
    if run.is_finished:
        return base
    started = RunDir(run.path).attempt.exists()
    return dataclasses.replace(base, state="pending", has_started=started)


def _with_places(every: list[Standing]) -> list[Standing]:
    """The same, with where jobs are elsewhere; asks where this is only if that matters."""
    kinds = {s.cluster for s in every if s.where and s.state != "finished"}
    here = {kind: launcher.here(kind) for kind in kinds}
    words = [launcher.apart(s.cluster, s.where, here.get(s.cluster, "")) for s in every]
    return [dataclasses.replace(s, apart=w) if w else s for s, w in zip(every, words, strict=True)]


def job_of(run: MeasuredRun) -> tuple[str, str, str]:
    """Cluster and job id of a run, "" for one whose submission was cut off; and where the job is:
    the Slurm cluster's name, or the host."""
    files = RunDir(run.path)
    job = read_json(files.job) or {}
    told = job.get("id") or (read_json(files.attempt) or {}).get("job", "")
    cluster = job.get("cluster") or run.config["job"].get("cluster", "")
    return cluster, str(told), str(job.get("where", ""))


def _stand(base: Standing, states: dict[str, JobState]) -> Standing:
    run, cluster, job = base.run, base.cluster, base.job
    if base.state == "finished":
        return base
    if not job and not run.has_ended:
        return dataclasses.replace(base, reason="not submitted yet")
    if base.apart:
        return dataclasses.replace(_by_itself(base, base.apart), is_sure=False)
    if cluster not in ("slurm", "local", "mpirun"):  # pods, or ranks that were started by hand
        return _by_itself(base, "by its own record alone")
    state = states.get(job) if cluster == "slurm" else _local_state(run, cluster, job)
    if state is not None and _will_go_on(run, state):
        return _alive(base, state)
    if state is not None and state.name == "UNKNOWN":
        return _by_itself(base, _NO_ANSWER)
    return _ended(base, state)


def _by_itself(base: Standing, reason: str) -> Standing:
    """A run whose cluster cannot be asked."""
    if base.run.has_ended:
        return dataclasses.replace(_ended(base, None), is_sure=reason != _NO_ANSWER)
    own = base.run.state["state"]
    word = own if own == "requeued" else _own_word(base.run, "pending")
    return dataclasses.replace(base, state=word, reason=reason, is_sure=False)


def _local_state(run: MeasuredRun, cluster: str, job: str) -> JobState | None:
    return None if run.has_ended else launcher.get(cluster).job_state(job, RunDir(run.path))


def _will_go_on(run: MeasuredRun, state: JobState) -> bool:
    """Whether a job waits or runs. A run that says that it has ended is right, unless Slurm has
    queued it again: its job may just be ending."""
    if state.name == "UNKNOWN":
        return False
    if run.has_ended:
        return state.name == "PENDING"
    return not state.ended or (state.name in _REQUEUED and bool(run.value("requeue")))


def _alive(base: Standing, state: JobState) -> Standing:
    if state.name not in ("PENDING", *_REQUEUED):
        reason = "" if state.name == "RUNNING" else state.name.lower()
        return dataclasses.replace(base, state=_own_word(base.run, "running"), reason=reason)
    # A run that was resumed waits for the first time, whatever was before.
    again = base.has_started and base.run.state["state"] != "submitted"
    word = "requeued" if again else "pending"
    return dataclasses.replace(
        base, state=word, reason=state.reason, expected_start=state.expected_start
    )


def _own_word(run: MeasuredRun, otherwise: str) -> str:
    """ "running" or "stopping", where the run says so itself."""
    return run.state["state"] if run.state["state"] in ("running", "stopping") else otherwise


def _ended(base: Standing, state: JobState | None) -> Standing:
    """A run that is over; its last words may be newer than what was read of it."""
    files = RunDir(base.run.path)
    run = dataclasses.replace(
        base.run,
        state=read_json(files.state) or base.run.state,
        result=read_json(files.result) or base.run.result,
    )
    base = dataclasses.replace(base, run=run)
    if run.is_finished:
        return dataclasses.replace(base, state="finished")
    told = run.state.get("reason") or ""
    if run.state["state"] == "cancelled":
        started = base.has_started or files.attempt.exists()
        reason = told or "cancelled"
        return dataclasses.replace(base, state="cancelled", reason=reason, has_started=started)
    # A setup line may fail before anything of ours starts: that is a try, too.
    if run.has_ended:
        return dataclasses.replace(base, state="failed", reason=told or "failed", has_started=True)
    if state is None:
        reason = "vanished: neither queue nor accounting knows its job"
        return dataclasses.replace(base, state="vanished", reason=reason, has_started=True)
    if base.cluster != "slurm":
        reason = f"vanished: {state.reason}"
        return dataclasses.replace(base, state="vanished", reason=reason, has_started=True)
    words = f"{state.name.lower()} {state.reason}".strip()
    cancelled = state.name == "CANCELLED"
    return dataclasses.replace(
        base,
        state="cancelled" if cancelled else "failed",
        reason=words,
        has_started=base.has_started or not cancelled,
    )


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
    said = said or records.read(found.run.path)
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
        What `summary` returns, and: program, job_options (the configuration), submission, hosts,
        history (a list of state, time, reason, exit_code), attempts, last_record (Unix seconds),
        evaluating (samples done and in all), checkpoints (a list of name, bytes, time), warnings,
        failures (a list of where, message, hint, attempt, time), result, model_path, logs.

    Raises:
        UsageError: its files cannot be read.
    """
    found = stand([MeasuredRun.read(run.path)])[0]
    said = records.read(run.path)
    return summary(found, said) | {
        "program": found.run.config["program"],
        "job_options": found.run.config["job"],
        "submission": found.run.config["submission"],
        "hosts": found.run.hosts,
        "history": found.run.state.get("history", []),
        "attempts": run.attempt_number(),
        "last_record": said.time,
        "evaluating": said.evaluating,
        "checkpoints": checkpoints(run),
        "warnings": [str(r.get("text")) for r in found.run.records("warning")],
        "failures": [_failure(f) for f in run.all_failures() if not f["secondary"]],
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


def note(facts: dict[str, Any]) -> str:
    """What is to be said of a state: why it is so, when it starts, how often it was requeued."""
    reason = str(facts["reason"]).removeprefix(f"{facts['state']}: ")
    words = [] if reason == facts["state"] or facts["state"] == "finished" else [reason]
    if facts["expected_start"]:
        words.append(f"starts about {facts['expected_start'].replace('T', ' ')}")
    if count := facts["requeues"]:
        words.append("requeued once" if count == 1 else f"requeued {count} times")
    return "; ".join(filter(None, words))


def metrics_words(metrics: dict[str, Any] | None) -> str:
    """ "accuracy 0.9123  f1 0.8870" """
    return "  ".join(f"{name} {number(value)}" for name, value in (metrics or {}).items())
