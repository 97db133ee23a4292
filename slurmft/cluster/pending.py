"""Why a job is pending: Slurm's reasons in words.

Source: "JOB REASON CODES" of squeue(1), https://slurm.schedmd.com/job_reason_codes.html. Sites and
plug-ins have others, and words are appended to some ("ReqNodeNotAvail, UnavailableNodes:n7").
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a job is pending."""

    reason: str
    """Slurm's own word."""
    cause: str
    """What the job waits for, as the end of "pending: "."""
    by_itself: bool
    """Whether it can start without that anybody does something."""
    action: str
    """What to do; "": nothing."""


def explain(reason: str, job: str = "JOB") -> Waiting | None:
    """Returns what a reason of Slurm's means; None where it is unknown.

    Args:
        reason: as squeue prints it.
        job: the id that goes into the commands to type.
    """
    for pattern, cause, by_itself, action in (*_REASONS, *_LIMITS):
        match = re.match(pattern, reason)
        if match is not None:
            limit = _limit(match.groupdict().get("limit", ""))
            return Waiting(
                reason=reason,
                cause=cause.format(limit=limit),
                by_itself=by_itself,
                action=action.format(job=job),
            )
    return None


_AGAIN = "slurmft cancel {job}, then slurmft resume {job}"
_LESS = f"{_AGAIN} with less (--nodes, --time, --cpus-per-task, --gpus-per-node, --mem)"
_ASK = "what is allowed: sacctmgr show association user=$USER; sacctmgr show qos"
_RELEASE = "scontrol release {job}"
_HELD_AFTER_FAILURE = (
    f"see the logs of the last attempt (slurmft logs), then: {_RELEASE}"
)

# Beginning of Slurm's reason, cause, whether the job can start by itself, what to do. The first
# that fits counts.
_REASONS: tuple[tuple[str, str, bool, str], ...] = (
    # --- its turn has not come ---
    (r"Resources\b", "it is next, and waits for free nodes", True, ""),
    (r"Priority\b", "jobs of higher priority are before it", True, ""),
    (r"SchedDefer", "the scheduler is busy, and looks at it soon", True, ""),
    (r"None$", "the scheduler has not looked at it yet", True, ""),
    (r"Cleaning|Prolog", "its last nodes are being cleaned up", True, ""),
    (r"BeginTime", "it may not start before a time", True, ""),
    (r"Reservation$", "its reservation has not begun", True, ""),
    (r"Licenses", "all licenses that it needs are in use", True, ""),
    (r"Power|NodeBooting", "its nodes are being switched on", True, ""),
    (r"Burst_?Buffer", "the burst buffer is not ready", True, ""),
    (r"FedJobLock", "the clusters of the federation agree on it", True, ""),
    (r"JobArrayTaskLimit", "as many tasks of its array run as may at once", True, ""),
    (r"MaxRequeue|JobHoldMaxRequeue", "it was requeued too often, and is held",
     False, _HELD_AFTER_FAILURE),
    # --- others have to end first ---
    (r"DependencyNeverSatisfied",
     "the job that it starts after ended otherwise than it requires", False,
     "slurmft cancel {job}, and submit it again without --after, or after another run"),
    (r"Dependency", "it starts after another job", True, ""),
    # --- somebody holds it ---
    (r"JobHeldUser", "you hold it", False, _RELEASE),
    (r"JobHeldAdmin", "an administrator holds it", False, "ask the site's support why"),
    (r"job requeued in held state|.*requeued held|JobLaunchFailure|launch failed",
     "its start failed, and Slurm holds it", False, _HELD_AFTER_FAILURE),
    (r"user env retrieval failed", "Slurm could not read your environment", False,
     _HELD_AFTER_FAILURE),
    # --- nodes ---
    (r"Nodes required for job are DOWN|NodeDown|.*UnavailableNodes:",
     "nodes that it needs are down, drained or reserved", True,
     "sinfo -R says why they are away; for others, submit it without --sbatch nodelist=... or "
     "with another --constraint"),
    (r"ReqNodeNotAvail.*[Mm]aintenance",
     "it would not end before maintenance begins", True,
     "a shorter --time may start before it: scontrol show reservation"),
    (r"ReqNodeNotAvail", "nodes that it names are in use, down or reserved", True,
     "sinfo -R says why nodes are away"),
    (r"ReservationDeleted", "its reservation was deleted", False,
     "scontrol update job={job} reservation="),
    (r"BadConstraints", "no node has what it requires", False,
     f"{_AGAIN} with another --constraint, --gpus-per-node or --mem; what there is: "
     "sinfo -o '%P %f %G %m'"),
    (r"FrontEndDown", "the front end is down", True, ""),
    # --- the partition ---
    (r"PartitionTimeLimit", "its time is beyond the partition's limit", False,
     f"{_AGAIN} with a shorter --time, or another --partition: sinfo -s"),
    (r"PartitionNodeLimit",
     "it asks for more nodes than the partition gives a job, or than are up", True,
     "sinfo -s shows how many of its nodes are up; if the partition gives a job fewer: "
     f"{_AGAIN} with fewer --nodes"),
    (r"PartitionConfig", "the partition does not give a job what it asks for", False,
     f"{_LESS}, or another --partition: sinfo -s"),
    (r"PartitionDown|PartitionInactive", "the partition is closed", True,
     f"for another one (sinfo -s): {_AGAIN} with --partition"),
    (r"MaxMemPerLimit", "it asks for more memory than a job may have", False,
     f"{_AGAIN} with a smaller --mem"),
    # --- accounts ---
    (r"InvalidAccount|AccountNotAllowed", "its account may not use the partition", False,
     f"{_AGAIN} with another --account; {_ASK}"),
    (r"InvalidQOS|QOSNotAllowed", "its account or partition does not have this QOS", False,
     f"{_AGAIN} with another --qos; {_ASK}"),
    (r"QOSUsageThreshold", "the QOS's share is used up", False,
     f"{_AGAIN} with another --qos; {_ASK}"),
    (r"DeadLine", "it cannot end before its deadline", False,
     f"{_AGAIN} with a shorter --time or --sbatch deadline=..."),
    (r"InactiveLimit|NonZeroExitCode|OutOfMemory|SystemFailure|TimeLimit",
     "its last attempt failed", False, _HELD_AFTER_FAILURE),
)  # fmt: skip

# Slurm names a limit on running jobs also where a job alone asks for more than that.
_ALONE = f"if none runs, it asks for more than that by itself: {_LESS}"
# Limits of an association (user and account) or of a QOS.
_LIMIT = r"(?P<limit>\w*?)(Limit)?$"
_LIMITS: tuple[tuple[str, str, bool, str], ...] = (
    (r"(Assoc|QOS)Grp(?P<limit>Jobs|SubmitJobs?)(Limit)?$",
     "your account or QOS as a whole has reached its limit of {limit}", True,
     f"it starts when others of it have ended; {_ASK}"),
    (r"(Assoc|QOS)Grp" + _LIMIT,
     "your account or QOS as a whole has reached its limit of {limit}", True,
     f"it starts when others of it have ended, or the limit's period has; {_ALONE}; {_ASK}"),
    (r"(Assoc|QOS)?Min" + _LIMIT, "the QOS requires more {limit} than it asks for", False,
     f"{_AGAIN} with more, or with another --qos; {_ASK}"),
    (r"(Assoc|QOS)?Max(?P<limit>Jobs|SubmitJobs?)PerAccount(Limit)?$",
     "the running jobs of all users of your account have reached its limit of {limit}", True,
     f"it starts when one of theirs or yours has ended; {_ASK}"),
    (r"(Assoc|QOS)?Max(?P<limit>\w*?)PerAccount(Limit)?$",
     "the running jobs of all users of your account have reached its limit of {limit}", True,
     f"it starts when one of theirs or yours has ended; {_ALONE}; {_ASK}"),
    (r"(Assoc|QOS)?Max(?P<limit>Jobs|SubmitJobs?)(PerUser)?(Limit)?$",
     "your running jobs have reached your limit of {limit}", True,
     "it starts when one of yours has ended: slurmft list"),
    (r"(Assoc|QOS)?Max(?P<limit>\w*?)PerUser(Limit)?$",
     "your running jobs have reached your limit of {limit}", True,
     f"it starts when one of yours has ended: slurmft list; {_ALONE}"),
    (r"(Assoc|QOS)?Max(?P<limit>\w*?)(Per(Job|Node))?(Limit)?$",
     "it asks for more {limit} than a job of yours may have", False,
     f"{_LESS}; {_ASK}"),
    (r"(AccountingPolicy|Association|Assoc|QOS)(Job|Resource|Time)?(Limit)?$",
     "a limit of your account or QOS is reached", True, _ASK),
)  # fmt: skip

_RESOURCES = (
    ("Cpu", "CPUs"),
    ("CPU", "CPUs"),
    ("Memory", "memory"),
    ("Mem", "memory"),
    ("Node", "nodes"),
    ("GRES", "GPUs and other GRES"),
    ("Gres", "GPUs and other GRES"),
    ("SubmitJobs", "submitted jobs"),
    ("Submit", "submitted jobs"),
    ("Jobs", "jobs"),
    ("Job", "jobs"),
    ("Wall", "time"),
    ("BB", "burst buffer"),
    ("Billing", "billing units"),
    ("Energy", "energy"),
    ("License", "licenses"),
)
"""Part of a reason -> what is limited; the first that fits counts."""


def _limit(name: str) -> str:
    """Returns what a limit is of: "GRESMinutes" -> "minutes of GPUs and other GRES"."""
    for part, text in _RESOURCES:
        if name.startswith(part):
            unit = name.removeprefix(part)
            if "RunMinutes" in unit:
                return f"minutes of {text} in running jobs"
            if "Minutes" in unit:
                return f"minutes of {text}"
            return text
    return name or "resources"
