"""How runs stand: what their directories say, set against what Slurm says of their jobs.

At most one squeue and one sacct answer for all runs together. A run whose job is on another Slurm
cluster, or on another host, is believed. Nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurmft import launchers, slurm
from slurmft.rundir import RunDir, read_json
from slurmft.runs import MeasuredRun
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
    states = slurm.job_states(asked, only_queued=ended)
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
    here = {kind: launchers.here(kind) for kind in kinds}
    words = [launchers.apart(s.cluster, s.where, here.get(s.cluster, "")) for s in every]
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
    return None if run.has_ended else launchers.get(cluster).job_state(job, RunDir(run.path))


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
