"""How runs stand: what their directories say, set against what Slurm says of their jobs.

At most one squeue and one sacct answer for all runs together. Nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurmft import launchers, slurm
from slurmft.rundir import RunDir, read_json
from slurmft.runs import Run
from slurmft.slurm import JobState

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

    run: Run
    state: str
    """One of STATES."""
    reason: str = ""
    """Why it waits, failed or was cancelled: Slurm's words, or its own."""
    cluster: str = ""
    job: str = ""
    """Its job's id; "" before there is one."""
    expected_start: str = ""
    """When Slurm thinks that a pending job starts: local time, 2026-11-22T14:05:00; "": unknown."""
    has_started: bool = True
    is_sure: bool = True
    """Whether the cluster was asked and answered, where that matters."""

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


def stand(found: Iterable[Run]) -> list[Standing]:
    """How runs stand, by their own records and, where these do not say the end, their jobs'."""
    every = list(found)
    jobs = {run.path: job_of(run) for run in every}
    open_ = [run for run in every if not run.is_finished and jobs[run.path][0] == "slurm"]
    asked = {jobs[run.path][1]: run for run in open_ if jobs[run.path][1]}
    ended = [job for job, run in asked.items() if run.has_ended]
    states = slurm.job_states(asked, only_queued=ended)
    return [_stand(run, *jobs[run.path], states) for run in every]


def job_of(run: Run) -> tuple[str, str]:
    """Cluster and job id of a run; "" for one whose submission was cut off."""
    files = RunDir(run.path)
    job = read_json(files.job) or {}
    told = job.get("id") or (read_json(files.attempt) or {}).get("job", "")
    return job.get("cluster") or run.config["job"].get("cluster", ""), str(told)


def _stand(run: Run, cluster: str, job: str, states: dict[str, JobState]) -> Standing:
    if run.is_finished:
        return Standing(run, "finished", cluster=cluster, job=job)
    started = RunDir(run.path).attempt.exists()
    base = Standing(run, "pending", cluster=cluster, job=job, has_started=started)
    if not job and not run.has_ended:
        return dataclasses.replace(base, reason="not submitted yet")
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
    word = _own_word(base.run, "pending")
    return dataclasses.replace(base, state=word, reason=reason, is_sure=False)


def _local_state(run: Run, cluster: str, job: str) -> JobState | None:
    return None if run.has_ended else launchers.get(cluster).job_state(job, RunDir(run.path))


def _will_go_on(run: Run, state: JobState) -> bool:
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


def _own_word(run: Run, otherwise: str) -> str:
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
