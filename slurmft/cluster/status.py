"""The status of runs: by their own records and, where these do not say the end, by their jobs."""

import contextlib
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.cluster import cost, launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import JobState
from slurmft.core import fingerprint
from slurmft.core.files import pick
from slurmft.runs import records, shapes
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_OUTCOMES = {
    "pending": "pending", "requeued": "pending", "running": "running", "stopping": "running",
    "finished": "finished", "failed": "failed", "cancelled": "failed", "vanished": "failed",
    "unknown": "running",
}  # fmt: skip
STATES = tuple(_OUTCOMES)
"""pending: the job waits, or was not submitted yet. requeued: it ran, and waits to resume.
stopping: the ranks save. vanished: the job is gone, and the run recorded no end. unknown: the run
recorded no end, and Slurm does not answer."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run."""

    run: MeasuredRun
    state: str
    """One of STATES."""
    reason: str = ""
    """Why it waits, failed or was cancelled: Slurm's words, or its own."""
    cluster: str = ""
    job: str = ""
    """The id of its job; "" before there is one."""
    where: str = ""
    """The name of its Slurm cluster, or its host; "" where that is not recorded."""
    elsewhere: str = ""
    """Where its job is, in words, if not here: it cannot be queried or cancelled from here."""
    expected_start: str = ""
    """When Slurm expects a pending job to start: local time, 2026-11-22T14:05:00; "": unknown."""
    has_started: bool = True
    is_sure: bool = True
    """False where the job's state matters, but its cluster did not answer or is elsewhere."""

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
        """How often its job was requeued since the run was last submitted."""
        past = self.run.state.since_submission()
        starts = len([each for each in past if each.state == "running"])
        avoided = len([each for each in past if each.avoided])
        waits = int(starts > 0 and self.state == "requeued")
        return max(0, starts - 1) + avoided + waits


def run_statuses(runs: Iterable[MeasuredRun]) -> list[RunStatus]:
    """The status of each run; Slurm is queried once for all of them."""
    statuses = [_by_files(run) for run in runs]
    clusters = {s.cluster for s in statuses if s.where and s.state != "finished"}
    here = {cluster: launcher.location(cluster) for cluster in clusters}
    apart = [launcher.other_location(s.cluster, s.where, here.get(s.cluster, "")) for s in statuses]
    statuses = [dataclasses.replace(s, elsewhere=w) for s, w in zip(statuses, apart, strict=True)]
    queried = {
        s.job: s.run
        for s in statuses
        if s.job and s.cluster == "slurm" and s.state != "finished" and not s.elsewhere
    }
    ended = [job for job, run in queried.items() if run.has_ended]
    states = commands.job_states(queried, only_queued=ended)
    return [_with_job_state(status, states) for status in statuses]


def _by_files(run: MeasuredRun) -> RunStatus:
    """What its files say of a run."""
    files = RunDir(run.path)
    job = files.read_job()
    return RunStatus(
        run,
        state="finished" if run.is_finished else "pending",
        cluster=job.cluster if job else run.config["job"].get("cluster", ""),
        job=files.job_id(),
        where=job.where if job else "",
        has_started=run.is_finished or files.attempt.exists(),
    )


def _with_job_state(base: RunStatus, states: dict[str, JobState]) -> RunStatus:
    run, cluster, job = base.run, base.cluster, base.job
    if base.state == "finished":
        return base
    if not job and not run.has_ended:
        return dataclasses.replace(base, reason="not submitted yet")
    # A cluster that cannot be asked: it is elsewhere, or of pods, or ranks were started by hand.
    if base.elsewhere or cluster not in ("slurm", "local", "mpirun"):
        if run.has_ended:
            return dataclasses.replace(_ended(base, None), is_sure=not base.elsewhere)
        recorded, reason = run.state.state, base.elsewhere or "by its own records alone"
        alive = recorded if recorded in ("requeued", "running", "stopping") else "pending"
        return dataclasses.replace(base, state=alive, reason=reason, is_sure=False)
    state = states.get(job) if cluster == "slurm" else None
    if cluster != "slurm" and not run.has_ended:
        state = launcher.get(cluster).job_state(job, RunDir(run.path))
    if state is None:
        return _ended(base, None)
    if state.name == "UNKNOWN":  # its cluster does not answer
        ended = _ended(base, None)
        if not ended.run.has_ended:
            ended = dataclasses.replace(base, state="unknown", reason=state.reason)
        return dataclasses.replace(ended, is_sure=ended.state == "finished")
    # The run's own record of its end counts, unless Slurm has queued the job again: the job may
    # just be ending.
    lives_on = not state.ended or (state.may_be_requeued and run.value("requeue"))
    is_alive = state.name == "PENDING" if run.has_ended else lives_on
    return _alive(base, state) if is_alive else _ended(base, state)


def _alive(base: RunStatus, state: JobState) -> RunStatus:
    if state.name != "PENDING" and not state.may_be_requeued:
        reason = "" if state.name == "RUNNING" else state.name.lower()
        return dataclasses.replace(base, state=_active_state(base.run, "running"), reason=reason)
    # The job of a resumed run waits for the first time, whatever jobs came before.
    again = base.has_started and base.run.state.state != "submitted"
    waits = state.reason == "Dependency" and _others(base.run, "after", "after_any")
    return dataclasses.replace(
        base,
        state="requeued" if again else "pending",
        reason=f"waits for {waits}" if waits else state.reason,
        expected_start=state.expected_start,
    )


def _others(run: MeasuredRun, *options: str) -> str:
    """The names of the runs that it starts after."""
    return ", ".join(Path(str(p)).name for name in options for p in run.value(name) or ())


def _active_state(run: MeasuredRun, otherwise: str) -> str:
    """ "running" or "stopping", where the run has recorded that."""
    return run.state.state if run.state.state in ("running", "stopping") else otherwise


def _ended(base: RunStatus, state: JobState | None) -> RunStatus:
    """A run that is over. Its files are read again: the last records may be newer."""
    files = RunDir(base.run.path)
    run = dataclasses.replace(
        base.run,
        state=files.get_state(),
        result=files.read_result() or base.run.result,
    )
    base = dataclasses.replace(base, run=run)
    if run.is_finished:
        return dataclasses.replace(base, state="finished")
    recorded, reason = run.state.state, run.state.reason
    if recorded == "cancelled":
        started = base.has_started or files.attempt.exists()
        return dataclasses.replace(
            base, state="cancelled", reason=reason or "cancelled", has_started=started
        )
    if state is not None and state.name == "CANCELLED" and not run.has_ended:
        unmet = state.reason in ("", "DependencyNeverSatisfied") and _others(run, "after")
        words = f"Slurm found that it can never start after {unmet}" if unmet else ""
        return dataclasses.replace(base, state="cancelled", reason=words or _job_words(state))
    # A setup line may fail before anything of slurmft starts: that counts as a start, too.
    base = dataclasses.replace(base, has_started=True)
    if run.has_ended:
        return dataclasses.replace(base, state="failed", reason=reason or "failed")
    if state is not None and base.cluster == "slurm":
        return dataclasses.replace(base, state="failed", reason=_job_words(state))
    why = "neither queue nor accounting knows its job" if state is None else state.reason
    return dataclasses.replace(base, state="vanished", reason=f"vanished: {why}")


def _job_words(state: JobState) -> str:
    """ "timeout", "cancelled by 1000" """
    return f"{state.name.lower()} {state.reason}".strip()


def described(run: MeasuredRun) -> dict[str, Any]:
    """What a run is, by its configuration: the first values of `summary`."""
    submission = run.config["submission"]
    fields = {name: run.value(name) for name in ("task", "model", "data", "nodes")}
    return {"name": run.name, "path": str(run.path), "user": submission.get("user")} | fields


def summary(status: RunStatus) -> dict[str, Any]:
    """A run as `slurmft list --json` prints it.

    Returns:
        name, path, user, task, model, data, nodes, submitted (ISO time), cluster (slurm, local,
        ...), where (the Slurm cluster's name, or the host), job, state (one of STATES), reason,
        expected_start (local time), requeues, and of `records.latest` steps_done, steps_total,
        epoch, samples_per_s, left_s, loss, metrics. None is what is not known.
    """
    return described(status.run) | {
        "submitted": status.run.config["submission"].get("time"),
        "cluster": status.cluster or None,
        "where": status.where or None,
        "job": status.job or None,
        "state": status.state,
        "reason": status.reason,
        "expected_start": status.expected_start or None,
        "requeues": status.requeues,
        **_progress(status),
    }


def _progress(status: RunStatus) -> dict[str, Any]:
    """The progress of a run: of a finished one by its result, else by its latest records."""
    result = status.run.result
    if status.state == "finished" and result is not None:
        numbers = ("steps", "total_steps", "epochs", "train_samples_per_s", "loss")
        known = pick(result, dict.fromkeys(numbers, float) | {"metrics": shapes.METRICS})
        return {
            "steps_done": known["steps"],
            "steps_total": known["total_steps"] or known["steps"],
            "epoch": known["epochs"],
            "samples_per_s": known["train_samples_per_s"],
            "left_s": 0.0,
            "loss": known["loss"],
            "metrics": known["metrics"],
        }
    latest = records.latest(status.run.path)
    del latest["evaluating"], latest["last_record"]
    return latest if status.is_alive else latest | {"left_s": None}


_FAILURE_KEYS = ("where", "message", "hint", "attempt", "time")


def run_facts(run: RunDir) -> dict[str, Any]:
    """All that is known of a run, as `slurmft status --json` prints it.

    Returns:
        What `summary` returns, and: cost (of `costs_of`, and advice), program, job_options (the
        configuration), submission, hosts,
        history (a list of state, time, reason, exit_code), changed (since submission: path -> how,
        in words), attempts, last_record (Unix seconds),
        evaluating (samples done and in all), checkpoints (a list of name, bytes, time), warnings,
        failures (a list of where, message, hint, attempt, time), result, model_path, logs.
    """
    status = run_statuses([MeasuredRun.read(run.path)])[0]
    if status.state == "failed" and not status.run.has_ended and status.cluster == "slurm":
        status = dataclasses.replace(status, reason=commands.noted(status.job) or status.reason)
    latest = records.latest(run.path)
    attempt = run.read_attempt()
    changed = attempt.changed if attempt else {}
    if status.is_alive and (status.state == "requeued" or run.awaits_begin()):
        changed = fingerprint.changes(run.load_config()) | changed
    (spent,) = cost.costs_of([status.run])
    return summary(status) | {
        "cost": spent | {"advice": cost.advice(spent, status.run)},
        "program": status.run.config["program"],
        "job_options": status.run.config["job"],
        "submission": status.run.config["submission"],
        "hosts": status.run.hosts,
        "history": status.run.state.history,
        "changed": changed,
        "attempts": run.attempt_number(),
        "last_record": latest["last_record"],
        "evaluating": latest["evaluating"],
        "checkpoints": checkpoints(run),
        "warnings": [str(r.get("text")) for r in status.run.records("warning")],
        "failures": [
            {key: getattr(failure, key) for key in _FAILURE_KEYS}
            for failure in run.all_failures()
            if not failure.secondary
        ],
        "result": status.run.result,
        "model_path": str(run.model) if run.model.is_dir() else None,
        "logs": str(run.logs),
    }


def checkpoints(run: RunDir) -> list[dict[str, Any]]:
    """The checkpoints, oldest first: name, bytes, time (Unix seconds)."""
    found = []
    for name in run.checkpoint_names():
        with contextlib.suppress(OSError):  # one that is just being removed
            path = run.checkpoints / name
            found.append({"name": name, "bytes": size_of(path), "time": path.stat().st_mtime})
    return found


def note(facts: dict[str, Any]) -> str:
    """The details of a state: its reason, the expected start, the number of requeues."""
    reason, state = str(facts["reason"]), facts["state"]
    reason = reason.removeprefix(f"{state}: ").removeprefix(f"{state}; ")
    words = [] if reason == state or state == "finished" else [reason]
    if facts["expected_start"]:
        words.append(f"starts about {facts['expected_start'].replace('T', ' ')}")
    if count := facts["requeues"]:
        words.append("requeued once" if count == 1 else f"requeued {count} times")
    return "; ".join(filter(None, words))
