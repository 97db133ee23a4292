"""Slurm's reasons for waiting, in words; the queue of a pending job."""

import dataclasses
import re
from typing import Any

import pytest

from slurmft.cluster import pending
from slurmft.cluster.job_state import Report
from slurmft.cluster.slurm import commands, queue_facts
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.options import flag, options
from slurmft.core.program import PREDICT
from slurmft.show import status_words

# "JOB REASON CODES" of Slurm 25.11, and the texts that the controller itself writes.
REASONS = """
AccountNotAllowed AccountingPolicy AssocGrpBB AssocGrpBBMinutes AssocGrpBBRunMinutes AssocGrpBilling
AssocGrpBillingMinutes AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit
AssocGrpEnergy AssocGrpGRES AssocGrpGRESMinutes AssocGrpJobsLimit AssocGrpLicense AssocGrpMemLimit
AssocGrpMemMinutes AssocGrpNodeLimit AssocGrpNodeRunMinutes AssocGrpSubmitJobsLimit
AssocGrpWallLimit AssocMaxBBMinutesPerJob AssocMaxBillingPerJob AssocMaxCpuMinutesPerJobLimit
AssocMaxCpuPerJobLimit AssocMaxCpuPerNode AssocMaxGRESPerJob AssocMaxGRESPerNode AssocMaxJobsLimit
AssocMaxMemPerJob AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit AssocMaxWallDurationPerJobLimit
AssociationJobLimit AssociationResourceLimit AssociationTimeLimit BadConstraints BeginTime
BurstBufferOperation BurstBufferResources BurstBufferStageIn Cleaning DeadLine Dependency
DependencyNeverSatisfied FedJobLock FrontEndDown InactiveLimit InvalidAccount InvalidQOS
JobArrayTaskLimit JobHeldAdmin JobHeldUser JobHoldMaxRequeue JobLaunchFailure Licenses
MaxBBPerAccount MaxCpuPerAccount MaxGRESPerAccount MaxJobsPerAccount MaxMemoryPerAccount
MaxMemPerLimit MaxNodePerAccount MaxSubmitJobsPerAccount NodeDown NonZeroExitCode None OutOfMemory
PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit Priority
Prolog QOSGrpBB QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpGRES QOSGrpJobsLimit QOSGrpMemLimit
QOSGrpNodeLimit QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSJobLimit QOSMaxBBPerUser
QOSMaxCpuMinutesPerJobLimit QOSMaxCpuPerJobLimit QOSMaxCpuPerNode QOSMaxCpuPerUserLimit
QOSMaxGRESPerJob QOSMaxGRESPerUser QOSMaxJobsPerUserLimit QOSMaxMemoryPerJob QOSMaxMemoryPerUser
QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit
QOSMaxWallDurationPerJobLimit QOSMinBB QOSMinBilling QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory
QOSMinNode QOSNotAllowed QOSResourceLimit QOSTimeLimit QOSUsageThreshold ReqNodeNotAvail Reservation
ReservationDeleted Resources SchedDefer SystemFailure TimeLimit
"""
TEXTS = [
    "ReqNodeNotAvail, UnavailableNodes:n1,n2",
    "ReqNodeNotAvail, Reserved for maintenance",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "launch failed requeued held",
    "job requeued in held state",
    "user env retrieval failed requeued held",
]


@pytest.mark.parametrize("reason", [*REASONS.split(), *TEXTS])
def test_reason_of_slurm_in_words(reason: str) -> None:
    waiting = pending.explain(reason, "17")
    assert waiting is not None
    assert waiting.cause
    for text in (waiting.cause, waiting.action):
        assert "{" not in text
        assert reason not in text
    # A job that cannot start by itself needs somebody who does something: a command to type.
    assert waiting.by_itself or waiting.action
    is_typed = re.match(r"slurmft|scontrol|see the logs|ask the site", waiting.action)
    assert waiting.by_itself or is_typed
    flags = set(re.findall(r"--[a-z-]+", waiting.action)) - {"--after"}
    changeable = {
        flag(name) for name, each in options(JobConfig).items() if not each.identifies
    }
    assert flags <= changeable


@pytest.mark.parametrize(
    ("reason", "cause", "by_itself"),
    [
        ("QOSMaxGRESPerUser", "limit of GPUs", True),
        ("AssocGrpCPUMinutesLimit", "limit of minutes of CPUs", True),
        ("AssocMaxCpuPerJobLimit", "more CPUs than a job", False),
        ("QOSMinGRES", "the QOS requires more GPUs", False),
        ("MaxCpuPerAccount", "all users of your account have reached its", True),
        ("AssocMaxJobsLimit", "your limit of jobs", True),
    ],
)
def test_limit_is_named(reason: str, cause: str, by_itself: bool) -> None:
    waiting = pending.explain(reason)
    assert waiting is not None
    assert cause in waiting.cause
    assert waiting.by_itself == by_itself


@pytest.mark.parametrize(
    ("reason", "may_be_alone"),
    [
        ("QOSMaxCpuPerUserLimit", True),
        ("QOSGrpNodeLimit", True),
        ("MaxGRESPerAccount", True),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocMaxJobsLimit", False),
        ("AssocGrpJobsLimit", False),
        ("MaxSubmitJobsPerAccount", False),
    ],
)
def test_a_job_may_exceed_a_limit_of_several_by_itself(
    reason: str, may_be_alone: bool
) -> None:
    """Then it waits for ever, whatever ends. A limit on the number of jobs lets one run."""
    waiting = pending.explain(reason, "17")
    assert waiting is not None
    assert ("slurmft cancel 17" in waiting.action) == may_be_alone


def test_unknown_reason_is_left_to_slurm() -> None:
    assert pending.explain("SitePluginSaysNo") is None


# --- the queue ------------------------------------------------------------------------------------


def test_jobs_ahead() -> None:
    text = "5|bob\n9_1|ann\n7|ann\n8|bob\n"
    found = queue_facts.parse_jobs_ahead(text, "7", "ann")
    assert found == "2 pending job(s) before it, 1 of them yours"
    # It has started meanwhile.
    assert queue_facts.parse_jobs_ahead(text, "11", "ann") is None


def test_nodes() -> None:
    text = "idle|2\nmix|1\nalloc|10\ndown*|1\ndrng|1\nresv|1\n"
    assert queue_facts.parse_nodes(text, "gpu", 4) == (
        "of the 16 nodes of the partition gpu 2 are idle, 11 in use, 3 down, drained or "
        "reserved; it needs 4"
    )
    assert queue_facts.parse_nodes("", "gpu", 4) is None


def test_limits_of_a_partition() -> None:
    text = "short|1-2|5:00\nshort|1-2|5:00\n"
    assert queue_facts.parse_partition_limits(text, 3) == (
        "the partition short gives a job at most 2 node(s), for 5:00; it asks for 3 node(s)"
    )
    open_end = queue_facts.parse_partition_limits("long|1-infinite|infinite\n", 9)
    assert open_end is not None
    assert "any number of nodes, without a time limit" in open_end
    assert queue_facts.parse_partition_limits("", 3) is None


def test_licenses() -> None:
    text = (
        "LicenseName=matlab Total=2 Used=2 Free=0 Reserved=0 Remote=no\n"
        "LicenseName=other Total=5 Used=1 Free=4 Reserved=0 Remote=no\n"
    )
    assert queue_facts.parse_licenses(text) == "licenses in use: 2 of 2 matlab"
    assert queue_facts.parse_licenses("No licenses configured in Slurm.\n") is None


def test_nodes_that_a_job_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "call", lambda *words: "idle|3\ndrng|1\n")
    report = Report(
        name="PENDING",
        reason="ReqNodeNotAvail, UnavailableNodes:n[3-4]",
        partition="gpu",
        nodes=2,
    )
    text = queue_facts.of_job("77", report).text
    assert text is not None
    assert text.endswith("it needs 2; away are n[3-4]")


def waiting_facts(reason: str) -> dict[str, Any]:
    waiting = pending.explain(reason)
    assert waiting is not None
    return dataclasses.asdict(waiting)


def test_a_time_to_begin_is_no_guess() -> None:
    facts: dict[str, Any] = {
        "state": "pending",
        "reason": "BeginTime",
        "waiting": waiting_facts("BeginTime"),
        "expected_start": "2026-11-22T14:05:00",
        "requeues": 0,
    }
    assert status_words.note(facts) == (
        "it may not start before a time (BeginTime); that is 2026-11-22 14:05:00"
    )
    facts |= {
        "reason": "Priority",
        "waiting": waiting_facts("Priority"),
    }
    assert "Slurm guesses a start at 2026-11-22 14:05:00" in status_words.note(facts)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxJobsPerUserLimit", "you run 1 job on 2 nodes, with 64 CPUs; 1"),
        ("AssocMaxJobsLimit", "you run 1 job on 2 nodes, with 64 CPUs; 1"),
        ("AssocGrpCpuLimit", "the account nlp runs 2 jobs on 3 nodes, with 72 CPUs; 2"),
        ("QOSGrpNodeLimit", "the QOS long runs 1 job on 5 nodes, with 5 CPUs; 0"),
    ],
)
def test_jobs_behind_a_limit(reason: str, words: str) -> None:
    lines = [
        "1|RUNNING|ann|nlp|normal|2|64|None",
        "2|RUNNING|bob|nlp|normal|1|8|None",
        "3|RUNNING|cyd|bio|long|5|5|None",
        f"4|PENDING|bob|nlp|normal|1|8|{reason}",
        f"5|PENDING|ann|nlp|normal|1|8|{reason}",
        "6|PENDING|ann|nlp|normal|1|8|Priority",
        f"7|PENDING|ann|nlp|long|1|8|{reason}",
        f"8|PENDING|ann|nlp|long|1|8|{reason}",
    ]
    text = "\n".join(lines)
    assert queue_facts.parse_limited_jobs(text, "7") == (
        f"{words} pending job(s) before it wait for the same limit"
    )
    assert queue_facts.parse_limited_jobs(text, "99") is None
    questions = [
        ask for pattern, ask in queue_facts._QUESTIONS if re.match(pattern, reason)
    ]
    assert questions[0] is queue_facts._limited_jobs


def test_reservations() -> None:
    text = (
        "ReservationName=later StartTime=2026-12-02T08:00:00 EndTime=2026-12-02T18:00:00 x=y\n"
        "ReservationName=maint StartTime=2026-12-01T08:00:00 EndTime=2026-12-01T18:00:00 x=y\n"
    )
    assert queue_facts.parse_reservations(text) == (
        "the reservation maint is from 2026-12-01 08:00:00 to 2026-12-01 18:00:00"
    )
    assert queue_facts.parse_reservations("No reservations in the system") is None


def test_waits_of_jobs_of_this_size() -> None:
    lines = []
    for minute in range(10):
        lines.append(f"gpu|2|2026-11-20T10:00:00|2026-11-20T10:{minute:02d}:00")
    lines.append("gpu|64|2026-11-20T10:00:00|2026-11-21T10:00:00")
    lines.append("cpu|2|2026-11-20T10:00:00|2026-11-21T10:00:00")
    lines.append("gpu|2|2026-11-20T10:00:00|Unknown")
    waits = queue_facts.parse_waits("\n".join(lines), "gpu", 2)
    assert waits is not None
    assert waits.jobs == 10
    assert waits.median_s == 270
    assert waits.ninth_decile_s == pytest.approx(486)
    assert queue_facts.parse_waits("\n".join(lines[:3]), "gpu", 2) is None


def test_facts_that_slurm_does_not_give_are_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*command: str, **rest: float) -> str:
        raise SlurmftError(f"{command[0]} failed")

    monkeypatch.setattr(commands, "call", refuse)
    report = Report(name="PENDING", reason="Priority", partition="gpu", nodes=2)
    assert queue_facts.of_job("7", report).lines() == []


def test_a_program_that_polls_asks_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def call(command: str, *words: str, **rest: float) -> str:
        calls.append(command)
        return ""

    monkeypatch.setattr(commands, "call", call)
    monkeypatch.setattr(queue_facts, "_answers", {})
    report = Report(name="PENDING", reason="Resources", partition="gpu", nodes=2)
    for _ in range(5):
        queue_facts.of_job("7", report)
    assert calls == ["sinfo", "sacct"]
    # Another state of the job is news.
    queue_facts.of_job("7", Report(name="PENDING", reason="Priority"))
    assert len(calls) == 4


# --- what to type next ----------------------------------------------------------------------------


def test_a_report_is_of_what_was_trained() -> None:
    assert status_words.next_commands("finished", "train") == ("report",)
    assert status_words.next_commands("finished", PREDICT) == ()
    assert "logs" in status_words.next_commands("failed", PREDICT)
