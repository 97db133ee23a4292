"""Messages of srun, as Slurm 22.05 printed them on the test cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.cluster.slurm import srun_log

KILLED = """\
srun: error: n3: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=4.0
srun: error: n2: task 0: Terminated
srun: Force Terminated StepId=4.0
"""
ABORTED = """\
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: got SIGCONT
srun: forcing job termination
srun: error: n1: task 0: Killed
srun: error: n2: task 1: Killed
"""
EXITED = """\
srun: error: n4: task 1: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=3.0
srun: error: n3: task 0: Terminated
"""
OOM = """\
slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks have been OOM \
Killed.
srun: error: n3: task 1: Out Of Memory
"""


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (KILLED, "the task of n3 was killed by SIGKILL"),
        (ABORTED, "srun was ended by a signal, and ended the tasks"),
        (EXITED, ""),
        (OOM, "the task of n3 was killed: out of memory"),
        (
            OOM.replace("Out Of Memory", "Killed"),
            "the task of n3 was killed by SIGKILL (out of memory)",
        ),
        (
            "srun: error: n1: tasks 0-3: Segmentation fault (core dumped)\n",
            "the task of n1 was killed by SIGSEGV",
        ),
        ("", ""),
        ("srun: Requested partition configuration not available now\n", ""),
    ],
)
def test_the_first_that_ended_is_the_cause(
    messages: str, cause: str, tmp_path: Path
) -> None:
    log = srun_log.path(tmp_path, "7")
    log.write_text(f"attempt 1\n{KILLED}attempt 2\n{messages}")
    assert srun_log.cause_of(log, 2) == cause
    assert srun_log.cause_of(log, 3) == ""
    assert srun_log.cause_of(tmp_path / "absent", 2) == ""


def test_srun_that_was_killed_itself(tmp_path: Path) -> None:
    log = srun_log.path(tmp_path, "7")
    log.write_text(f"attempt 1\n{KILLED}attempt 2\nsrun: warning: slow\n")
    cause = srun_log.own_end(log, 2, 137)
    assert "was killed by SIGKILL" in cause
    # Nobody has said so: the next start would take less.
    assert not srun_log.is_out_of_memory(cause)
    assert srun_log.own_end(log, 2, 143) == ""
    # Of what it said, or whether it could, nothing else follows.
    assert srun_log.own_end(log, 1, 137) == ""
    assert srun_log.own_end(log, 3, 137) == ""
    assert srun_log.own_end(tmp_path / "absent", 2, 137) == ""


@pytest.mark.parametrize(
    ("messages", "tasks"),
    [
        (OOM, {1}),
        (OOM.replace("task 1:", "tasks 0-2,5:"), {0, 1, 2, 5}),
        (OOM + "srun: error: n4: task 0: Out Of Memory\n", {0, 1}),
        # Another one has not ended well.
        (OOM + EXITED, set()),
        (OOM + KILLED, set()),
        (ABORTED + OOM, set()),
        ("", set()),
    ],
)
def test_tasks_whose_memory_ran_out(
    messages: str, tasks: set[int], tmp_path: Path
) -> None:
    log = srun_log.path(tmp_path, "7")
    log.write_text(f"attempt 1\n{KILLED}attempt 2\n{messages}")
    assert srun_log.tasks_out_of_memory(log, 2) == tasks
    assert srun_log.tasks_out_of_memory(log, 3) == set()


OVER_LIMIT = """\
slurmstepd-n1: error: StepId=1.0 exceeded memory limit (932265984 > 734003200), being killed
slurmstepd-n1: error: Exceeded job memory limit
"""
"""As Slurm 22.05 wrote it into the log of the job, with JobAcctGatherParams=OverMemoryKill."""


def test_limit_that_slurm_itself_compares_with(tmp_path: Path) -> None:
    log = tmp_path / "1_0_log.err"
    assert srun_log.over_limit(log) == ""
    log.write_text(OVER_LIMIT)
    cause = srun_log.over_limit(log)
    assert cause == "the task of n1 was killed: out of memory"
    assert srun_log.is_out_of_memory(cause)
    # That was another attempt.
    log.write_text(f"{OVER_LIMIT}slurmft: requeue: {cause}\nslurmstepd-n1: error: x\n")
    assert srun_log.over_limit(log) == ""
    end = (
        "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026 DUE TO PREEMPTION ***"
    )
    log.write_text(f"{OVER_LIMIT}{end}\n")
    assert srun_log.over_limit(log) == ""
