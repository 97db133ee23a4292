"""Slurm's commands: what they print, read; what is asked, and what no answer means.

Texts are what Slurm 22.05.8 printed on the test cluster.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.job_state import NO_ACCOUNTING, NO_ANSWER, Report
from slurmft.cluster.slurm import commands
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.runs.rundir import RunDir

NO_SUCH_JOB = "slurm_load_jobs error: Invalid job id specified"
NO_CONTROLLER = (
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
)
NO_DATABASE = """\
sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to \
host:login:27819: Connection refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused"""
KEEPS_NONE = "Slurm accounting storage is disabled"

SHOWN = (
    "JobId=1 JobName=j.sh\n   UserId=root(0) GroupId=root(0) Priority=4294901759 Nice=0 "
    "Account=root QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:08 TimeLimit=00:10:00 "
    "TimeMin=N/A NodeList=n1 BatchHost=n1 NumNodes=1 NumCPUs=2\n   Command=/home/ada/j.sh 100\n"
)
CANCELLED = SHOWN.format(state="CANCELLED", reason="None", code="0:15")


class Slurm:
    """Answers to Slurm's commands, by the command's name: a text, or an error to fail with. Of
    several the last one stays."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, list[Any]] = {
            name: list(found) if isinstance(found, list) else [found]
            for name, found in answers.items()
        }
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *command: str, timeout_s: float = 30) -> str:
        self.calls.append(command)
        answers = self.answers.get(command[0], [""])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, SlurmftError):
            raise answer
        return str(answer)

    @property
    def asked(self) -> list[str]:
        return [" ".join(command[:2] if command[0] == "scontrol" else command[:1])
                for command in self.calls]  # fmt: skip


def failed(text: str, program: str = "squeue") -> SlurmftError:
    """As `call` raises it."""
    return SlurmftError(f"{program} failed (exit 1): {text}", code=Exit.SUBMIT)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slurm]:
    """Puts answers in the place of Slurm's commands."""

    def set_up(**answers: Any) -> Slurm:
        made = Slurm(**answers)
        monkeypatch.setattr(commands, "call", made)
        return made

    return set_up


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for another group")
def test_a_script_that_was_read_through_a_held_folder_is_known(tmp_path: Path) -> None:
    """Where others can rename, the queue does not have its path."""
    run = RunDir(tmp_path / "run")
    script = run.submitit / ".submission_file_ab12.sh"
    script.parent.mkdir(parents=True)
    run.config.touch()
    script.touch()
    tmp_path.chmod(0o770)
    os.chown(tmp_path, os.geteuid(), 21100)
    with run.held():
        named = commands.script_argument(script)
    assert named.startswith(f"/proc/{os.getpid()}/fd/")
    queue = f"11|/proc/1/fd/3/submitit/.submission_file_cd34.sh\n12|{named}\n"
    assert commands.parse_job_of_script(queue, run.submitit) == "12"
    tmp_path.chmod(0o700)
    assert commands.script_argument(script) == str(script)


def test_uses_of_starts_and_steps() -> None:
    """Requeued once, on two nodes; a step's tasks are of both starts."""
    text = """\
7|60|billing=8,cpu=8,gres/gpu=2,mem=128G,node=2|billing=8,cpu=8,gres/gpu=2,mem=128G,node=2||500
7.batch|60||cpu=4,mem=64G,node=1|100M|
7.0|61||cpu=8,node=2|9.50G|
7|30|cpu=8,mem=128G,node=2|cpu=8,node=2||0
7_3|0|cpu=1,mem=100M,node=1|||
junk
"""
    found = commands.parse_job_uses(text)
    first, second = found["7"]
    assert first == commands.JobUse(
        elapsed_s=60, nodes=2, cpus=8, gpus=2, memory_bytes=128 * 2**30,
        peak_bytes=int(9.5 * 2**30), energy_j=500,
    )  # fmt: skip
    assert (second.elapsed_s, second.gpus, second.peak_bytes, second.energy_j) == (
        30,
        0,
        0,
        0,
    )
    assert second.memory_bytes == 128 * 2**30
    assert found["7_3"][0].elapsed_s == 0
    assert commands.parse_job_uses("") == {}


def test_squeue() -> None:
    assert commands.parse_squeue("PENDING|Resources\n") == Report(
        name="PENDING", reason="Resources"
    )
    assert commands.parse_squeue("RUNNING|None\n") == Report(name="RUNNING")
    assert commands.parse_squeue("") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED|0:0\n", Report(name="COMPLETED")),
        ("FAILED|4:0\n", Report(name="FAILED", exit_code=4)),
        ("FAILED|4:9\n", Report(name="FAILED", exit_code=4)),
        (
            "CANCELLED by 1000|0:15\n",
            Report(name="CANCELLED", reason="by 1000", exit_code=143),
        ),
        ("TIMEOUT|0:0", Report(name="TIMEOUT")),
        ("RUNNING|", Report(name="RUNNING")),
        ("\n", None),
    ],
)
def test_sacct(text: str, state: Report | None) -> None:
    assert commands.parse_sacct(text) == state


def test_scontrol(slurm: Callable[..., Slurm]) -> None:
    text = "JobId=7 JobName=a b\n   JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15\n"
    slurm(squeue="", sacct="", scontrol=text)
    assert commands.job_state("7") == Report(
        name="TIMEOUT", reason="TimeLimit", exit_code=143
    )
    slurm(squeue="", sacct="", scontrol="nothing")
    assert commands.job_state("7") is None


def test_partitions_of_several_node_kinds_are_one() -> None:
    found = commands.parse_partitions(
        "batch|up|1:00:00|3|4\nbatch|up|1:00:00|1|8\nurgent|down|30:00|2|4\n"
    )
    assert [(p.name, p.nodes, p.state) for p in found] == [
        ("batch", 4, "up"),
        ("urgent", 2, "down"),
    ]
    assert str(found[1]) == "urgent (2 nodes of 4 CPUs, time limit 30:00, down)"


def test_jobs_that_ask_for_more_than_their_partition_has() -> None:
    known = commands.parse_partitions("batch|up|1:00:00|4|4\nlong|up|infinite|4|4\n")

    def why(text: str) -> str | None:
        return commands.parse_never_starts(text, known)

    assert "5 nodes, but the partition batch has 4" in str(
        why("PENDING|PartitionConfig|batch|5|10:00|5")
    )
    assert "10:00:00" in str(why("PENDING|PartitionTimeLimit|batch|1|10:00:00|1"))
    # Nodes that are down now, or limits of somebody else: these pass.
    assert why("PENDING|PartitionNodeLimit|batch|4|1:00:00|4\n") is None
    assert why("PENDING|Priority|long|4|10-00:00:00|4") is None
    assert why("PENDING|Priority|long|4|UNLIMITED|4") is None
    assert why("RUNNING|None|batch|4|10:00|4") is None
    assert "9 CPUs a node, but those of the partition batch have 4" in str(
        why("PENDING|PartitionConfig|batch|2|10:00|17")
    )
    assert why("PENDING|Resources|batch|2|10:00|17") is None
    # Some nodes of this partition may be large enough.
    mixed = commands.parse_partitions("any|up|1:00|2|8\nany|up|1:00|2|4\n")
    assert mixed[0].cpus_per_node == "4+"
    line = "PENDING|PartitionConfig|any|1|0:30|6"
    assert commands.parse_never_starts(line, mixed) is None
    assert why("") is None


def test_states_of_many_jobs() -> None:
    text = "12_0|RUNNING|2026-11-22T10:00:00|None\n12_1|PENDING|N/A|JobArrayTaskLimit\n"
    text += "13|PENDING|2026-11-22T14:05:00|Resources\n\n"
    found = commands.parse_squeue_jobs(text)
    assert found["12_0"] == Report(name="RUNNING")
    assert found["12_1"] == Report(name="PENDING", reason="JobArrayTaskLimit")
    start = "2026-11-22T14:05:00"
    assert found["13"] == Report(
        name="PENDING", reason="Resources", expected_start=start
    )
    assert set(found) == {"12_0", "12_1", "13"}
    ended = commands.parse_sacct_jobs(
        "12_0|REQUEUED|0:0\n12_0|FAILED|4:0\n14|COMPLETED|0:0\n"
    )
    assert ended["12_0"] == Report(name="FAILED", exit_code=4)


def test_max_array_size(slurm: Callable[..., Slurm]) -> None:
    slurm(scontrol="MaxArraySize            = 4001\nMaxJobCount = 7\n")
    assert commands.max_array_size() == 4001
    slurm(scontrol="")
    assert commands.max_array_size() == 1001
    # a line of another setting that has the name in it
    slurm(scontrol="OldMaxArraySize = 7\nMaxArraySize = 0\n")
    assert commands.max_array_size() == 1


# --- the state of one job -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "state", "asked"),
    [
        ({"squeue": "RUNNING|None\n"}, Report(name="RUNNING"), 1),
        ({"squeue": "PENDING|Resources\n"}, Report(name="PENDING", reason="Resources"), 1),
        # it has ended: accounting has the exit code, and who cancelled it
        ({"squeue": "CANCELLED|None\n", "sacct": "1|CANCELLED by 0|0:15\n"},
         Report(name="CANCELLED", reason="by 0", exit_code=143), 2),
        ({"squeue": failed(NO_SUCH_JOB), "sacct": "1|FAILED|4:0\n"},
         Report(name="FAILED", exit_code=4), 2),
        # no accounting, or not yet: the controller knows it for minutes
        ({"squeue": "", "sacct": failed(KEEPS_NONE), "scontrol": CANCELLED},
         Report(name="CANCELLED", exit_code=143), 3),
        ({"squeue": "", "sacct": "", "scontrol": CANCELLED},
         Report(name="CANCELLED", exit_code=143), 3),
        ({"squeue": failed(NO_CONTROLLER), "sacct": "1|COMPLETED|0:0\n"},
         Report(name="COMPLETED"), 2),
        # accounting has not heard of its end
        ({"squeue": "", "sacct": "1|RUNNING|0:0\n", "scontrol": CANCELLED},
         Report(name="CANCELLED", exit_code=143), 3),
        ({"squeue": failed(NO_SUCH_JOB), "sacct": "1|RUNNING|0:0\n",
          "scontrol": failed(NO_SUCH_JOB)}, Report(name="RUNNING"), 3),
        ({"squeue": failed(NO_CONTROLLER), "sacct": "1|RUNNING|0:0\n"},
         Report(name="RUNNING"), 2),
        # neither knows it
        ({"squeue": failed(NO_SUCH_JOB), "scontrol": failed(NO_SUCH_JOB)}, None, 3),
        ({"squeue": failed(NO_SUCH_JOB), "sacct": failed(KEEPS_NONE),
          "scontrol": failed(NO_SUCH_JOB)}, None, 3),
        ({"squeue": failed(NO_SUCH_JOB), "scontrol": failed(NO_SUCH_JOB),
          "sacct": SlurmftError("sacct is not on the PATH")}, None, 3),
        # no answer is none
        ({"squeue": failed(NO_SUCH_JOB), "sacct": failed(NO_DATABASE),
          "scontrol": failed(NO_SUCH_JOB)}, NO_ACCOUNTING, 3),
        ({"squeue": failed(NO_CONTROLLER), "scontrol": failed(NO_CONTROLLER)}, NO_ANSWER, 3),
        ({"squeue": failed(NO_SUCH_JOB), "scontrol": failed(NO_CONTROLLER)}, NO_ANSWER, 3),
        ({"squeue": failed(NO_CONTROLLER), "scontrol": failed(NO_SUCH_JOB)}, NO_ANSWER, 3),
        ({"squeue": failed(NO_CONTROLLER), "sacct": failed(NO_DATABASE),
          "scontrol": failed(NO_CONTROLLER)}, NO_ANSWER, 3),
        ({"squeue": SlurmftError("squeue did not answer within 30 s"), "sacct": "",
          "scontrol": failed(NO_CONTROLLER)}, NO_ANSWER, 3),
    ],
)  # fmt: skip
def test_state_of_a_job(
    slurm: Callable[..., Slurm],
    answers: dict[str, Any],
    state: Report | None,
    asked: int,
) -> None:
    made = slurm(**answers)
    assert commands.job_state("1") == state
    assert made.asked == ["squeue", "sacct", "scontrol show"][:asked]
    assert all("1" in command[-1] or "--jobs=1" in command for command in made.calls)


@pytest.mark.parametrize(
    ("sacct", "state", "tries"),
    [
        (["", "1|RUNNING|0:0", "1|CANCELLED by 0|0:15"],
         Report(name="CANCELLED", reason="by 0", exit_code=143), 3),
        ("1|RUNNING|0:0", Report(name="CANCELLED"), 11),
        (failed(KEEPS_NONE), Report(name="CANCELLED"), 1),
    ],
)  # fmt: skip
def test_who_has_cancelled_a_job(
    slurm: Callable[..., Slurm],
    pauses: list[float],
    sacct: Any,
    state: Report,
    tries: int,
) -> None:
    made = slurm(sacct=sacct)
    assert commands.await_accounting("1", Report(name="CANCELLED")) == state
    assert made.asked == ["sacct"] * tries


def test_names_of_no_answer() -> None:
    """An unknown state is no end."""
    assert {NO_ANSWER.name, NO_ACCOUNTING.name} == {"UNKNOWN"}
    assert not NO_ANSWER.ended
    assert not NO_ACCOUNTING.ended
    assert NO_ANSWER.reason == "Slurm does not answer"
    assert NO_ACCOUNTING.reason == "it left the queue; accounting does not answer"


@pytest.mark.parametrize(
    ("name", "ended"),
    [("RUNNING", False), ("PENDING", False), ("COMPLETING", False), ("SUSPENDED", False),
     ("REQUEUED", False), ("COMPLETED", True), ("FAILED", True), ("TIMEOUT", True),
     ("CANCELLED", True), ("NODE_FAIL", True), ("PREEMPTED", True), ("OUT_OF_MEMORY", True),
     ("BOOT_FAIL", True), ("DEADLINE", True), ("REVOKED", True)],
)  # fmt: skip
def test_states_that_are_ends(name: str, ended: bool) -> None:
    assert Report(name=name).ended == ended


# --- states of many jobs --------------------------------------------------------------------------

CANCELLED_ARRAYS = """\
2_[0-2,4-9%4]|CANCELLED by 0|0:0
3_[1,3,5-9,20,22,24]|CANCELLED by 0|0:0
4_[0-1,4,7,10,13-14,16,19,21-22,25,28,31,34-35,37,40,42-43,46,4...]|CANCELLED by 0|0:0
5_0|TIMEOUT|0:0
5_[0-5%1]|CANCELLED by 0|0:0
7|COMPLETED|0:0
"""
"""What sacct prints of arrays that were cancelled while they waited: 5_0 had started."""


def test_a_pending_array_that_was_cancelled() -> None:
    found = commands.parse_sacct_jobs(CANCELLED_ARRAYS)
    cancelled = Report(name="CANCELLED", reason="by 0")
    assert {job for job in found if job.startswith("2")} == {
        f"2_{task}" for task in (0, 1, 2, 4, 5, 6, 7, 8, 9)
    }
    assert {
        found[job] for job in ("2_0", "2_9", "3_1", "3_24", "4_46", "5_1", "5_5")
    } == {cancelled}
    assert found["5_0"] == Report(name="TIMEOUT")  # by its own line, wherever that is
    reverse = "".join(reversed(CANCELLED_ARRAYS.splitlines(keepends=True)))
    assert commands.parse_sacct_jobs(reverse)["5_0"] == Report(name="TIMEOUT")
    assert found["7"] == Report(name="COMPLETED")
    assert "4_4..." not in found


def test_a_cancelled_task_that_never_started(slurm: Callable[..., Slurm]) -> None:
    """sacct --jobs=2_5 finds nothing; the controller has forgotten the job."""
    made = slurm(
        squeue=failed(NO_SUCH_JOB), sacct=CANCELLED_ARRAYS, scontrol=failed(NO_SUCH_JOB)
    )
    assert commands.job_state("2_5") == Report(name="CANCELLED", reason="by 0")
    assert made.calls[1][-1] == "--jobs=2"
    found = commands.job_states(["2_5", "2_3", "7"])
    assert {job: state.name for job, state in found.items()} == {
        "2_5": "CANCELLED", "7": "COMPLETED",
    }  # fmt: skip


def test_a_cancelled_array_that_accounting_has_just_heard_of(
    slurm: Callable[..., Slurm],
) -> None:
    slurm(squeue="", sacct="2|CANCELLED by 0|0:0\n", scontrol=failed(NO_SUCH_JOB))
    cancelled = Report(name="CANCELLED", reason="by 0")
    assert commands.job_states(["2_0", "2_3"]) == {"2_0": cancelled, "2_3": cancelled}
    assert commands.job_state("2_3") == cancelled
    assert commands.job_states(["3_0"]) == {}


def test_many_jobs_are_asked_for_by_two_calls(slurm: Callable[..., Slurm]) -> None:
    made = slurm(squeue="12_0|RUNNING|N/A|None\n", sacct="12_1|TIMEOUT|0:0\n")
    found = commands.job_states(["12_0", "12_1", "9_7"])
    assert {job: state.name for job, state in found.items()} == {
        "12_0": "RUNNING",
        "12_1": "TIMEOUT",
    }
    assert made.asked == ["squeue", "sacct"]
    assert made.calls[0][-1] == made.calls[1][-1] == "--jobs=12,9"
    assert {"--array", "--states=all"} <= set(made.calls[0])
    made.calls.clear()  # of 9_7 only a place in the queue would matter
    commands.job_states(["12_0", "9_7"], only_queued=["9_7"])
    assert made.asked == ["squeue"]
    assert commands.job_states([]) == {}
    assert made.asked == ["squeue"]


def test_the_queue_comes_before_accounting(slurm: Callable[..., Slurm]) -> None:
    """Accounting may have the state of an earlier attempt."""
    slurm(
        squeue="8|PENDING|2026-11-22T21:02:29|BeginTime\n",
        sacct="8|NODE_FAIL|0:0\n9|FAILED|1:0",
    )
    found = commands.job_states(["8", "9"])
    assert found["8"].name == "PENDING"
    assert found["9"] == Report(name="FAILED", exit_code=1)


@pytest.mark.parametrize(
    ("squeue", "sacct", "found"),
    [
        (failed(NO_CONTROLLER), "1|FAILED|1:0\n2|FAILED|1:0", {"1": NO_ANSWER, "2": NO_ANSWER}),
        ("1|RUNNING|N/A|None\n", failed(NO_DATABASE),
         {"1": Report(name="RUNNING"), "2": NO_ACCOUNTING}),
        (failed(NO_SUCH_JOB), failed(NO_DATABASE), {"1": NO_ACCOUNTING, "2": NO_ACCOUNTING}),
        ("1|RUNNING|N/A|None\n", failed(KEEPS_NONE), {"1": Report(name="RUNNING")}),
        (failed(NO_SUCH_JOB), failed(KEEPS_NONE), {}),
        ("", "", {}),
    ],
)  # fmt: skip
def test_no_answer_about_many_jobs(
    slurm: Callable[..., Slurm], squeue: Any, sacct: Any, found: dict[str, Report]
) -> None:
    slurm(squeue=squeue, sacct=sacct)
    assert commands.job_states(["1", "2"]) == found


def test_twenty_thousand_jobs_are_asked_for_in_pieces(
    slurm: Callable[..., Slurm],
) -> None:
    jobs = [str(1_000_000 + i) for i in range(20_000)]
    made = slurm(
        squeue=["1000000|RUNNING|N/A|None", ""], sacct=["", "1019999|FAILED|4:0", ""]
    )
    found = commands.job_states(jobs)
    assert {job: state.name for job, state in found.items()} == {
        "1000000": "RUNNING",
        "1019999": "FAILED",
    }
    assert made.asked == ["squeue"] * 4 + ["sacct"] * 4
    asked = [
        job
        for call in made.calls[:4]
        for job in call[-1].removeprefix("--jobs=").split(",")
    ]
    assert sorted(asked) == jobs
    # the kernel's limit
    assert max(len(call[-1]) for call in made.calls) < 128 * 1024 - 1


def test_a_piece_without_an_answer_makes_all_unknown(
    slurm: Callable[..., Slurm],
) -> None:
    jobs = [str(1_000_000 + i) for i in range(12_000)]
    made = slurm(squeue=["1000000|RUNNING|N/A|None", failed(NO_CONTROLLER)])
    assert set(commands.job_states(jobs).values()) == {NO_ANSWER}
    assert made.asked == ["squeue", "squeue"]  # it is not asked again and again


# --- calls ----------------------------------------------------------------------------------------


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH; nothing else of Slurm is on it."""
    made = tmp_path / "bin"
    made.mkdir()
    monkeypatch.setenv("PATH", f"{made}:/bin")
    for name in ("squeue", "sbatch", "sinfo", "sacct", "scontrol"):
        program(made, name, f"echo no {name} >&2; exit 9")
    return made


@pytest.mark.processes
def test_call_returns_what_is_printed(path: Path) -> None:
    program(path, "squeue", 'echo "$@"; echo "$SLURM_BITSTR_LEN"; echo noise >&2')
    assert commands.call("squeue", "--jobs=1", "x y") == "--jobs=1 x y\n0\n"


@pytest.mark.processes
def test_call_says_what_failed(path: Path) -> None:
    program(
        path,
        "squeue",
        "echo slurm_load_jobs error: Invalid job id specified >&2; exit 3",
    )
    with pytest.raises(SlurmftError) as caught:
        commands.call("squeue")
    assert caught.value.message == f"squeue failed (exit 3): {NO_SUCH_JOB}"
    assert caught.value.code == Exit.SUBMIT


@pytest.mark.processes
def test_call_of_what_is_not_there_or_cannot_be_started(path: Path) -> None:
    with pytest.raises(SlurmftError, match="nothing-of-slurm is not on the PATH"):
        commands.call("nothing-of-slurm")
    with pytest.raises(SlurmftError, match="squeue: Argument list too long"):
        commands.call("squeue", "1" * 200_000)


@pytest.mark.processes
def test_call_waits_so_long(path: Path) -> None:
    program(path, "squeue", "exec sleep 30")
    with pytest.raises(
        SlurmftError, match=r"squeue did not answer within 0 s"
    ) as caught:
        commands.call("squeue", timeout_s=0.2)
    assert "controller" in str(caught.value.hint)


@pytest.mark.processes
def test_sbatch(path: Path) -> None:
    program(path, "sbatch", 'echo "$@" >$(dirname $0)/given; echo "12;alpha"')
    assert commands.sbatch(["--nodes=2"], "job.sh") == "12"
    assert (path / "given").read_text() == "--parsable --nodes=2 job.sh\n"
    assert commands.available()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "look"),
    [
        ("Invalid generic resource (gres) specification", "sinfo -o '%P %D %G'"),
        ("Memory specification can not be satisfied", "sinfo -o '%P %D %m'"),
        ("Invalid account or account/partition combination specified", ""),
    ],
)
def test_sbatch_refuses_what_no_node_has(path: Path, words: str, look: str) -> None:
    """The lines of sbatch are told apart; the hint has the command that shows what nodes have."""
    lines = f"sbatch: error: {words}\nsbatch: error: Batch job submission failed: x"
    program(path, "sbatch", f'echo "{lines}" >&2; exit 1')
    program(path, "sinfo", 'echo "batch|up|1:00:00|1|2"')
    with pytest.raises(SlurmftError) as caught:
        commands.sbatch([], "job.sh")
    text = f"(exit 1): {words}; Batch job submission failed: x"
    assert caught.value.message.endswith(text)
    assert str(caught.value.hint).startswith("partitions here: batch")
    assert str(caught.value.hint).endswith(look or "up)")


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("option '--hold' doesn't allow an argument", "its name alone: --sbatch NAME"),
        ("option '--nice' requires an argument", "--sbatch NAME=VALUE"),
        ("unrecognized option '--holt'", "sbatch --help lists them"),
    ],
)
def test_sbatch_refuses_how_an_option_is_written(words: str, cure: str) -> None:
    error = commands.refusal(f'sbatch: {words}\nTry "sbatch --help"\n', 255)
    assert words in error.message
    assert str(error.hint).endswith(cure)


@pytest.mark.processes
def test_sbatch_refuses(path: Path) -> None:
    words = "Batch job submission failed: Invalid partition name specified"
    program(path, "sbatch", f'echo "sbatch: error: {words}" >&2; exit 1')
    program(path, "sinfo", 'echo "batch|up|1:00:00|1|2"')
    with pytest.raises(SlurmftError) as caught:
        commands.sbatch([], "job.sh")
    assert caught.value.message == f"sbatch refused the job (exit 1): {words}"
    assert (
        caught.value.hint
        == "partitions here: batch (1 node of 2 CPUs, time limit 1:00:00, up)"
    )
    assert caught.value.code == Exit.SUBMIT
    program(path, "sinfo", "exit 1")
    with pytest.raises(SlurmftError) as caught:
        commands.sbatch([], "job.sh")
    assert (
        caught.value.hint
        == "sinfo shows no partitions: is Slurm up? Without it: --cluster local"
    )
    # Commands that need nodes of Slurm have no --cluster.
    assert commands.offers(otherwise="") == "sinfo shows no partitions: is Slurm up?"
    assert commands.refusal("", 2).message.endswith("(exit 2): it gave no reason")


@pytest.mark.processes
def test_sbatch_is_not_there_or_silent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(path, "sbatch", "exec sleep 30")
    monkeypatch.setattr(commands, "_SBATCH_TIMEOUT_S", 0.2)
    with pytest.raises(SlurmftError, match="sbatch did not answer") as caught:
        commands.sbatch([], "job.sh")
    assert "may have submitted the job" in str(caught.value.hint)
    (path / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(path))
    assert not commands.available()
    with pytest.raises(SlurmftError, match="sbatch is not on the PATH"):
        commands.sbatch([], "job.sh")


# --- requeue --------------------------------------------------------------------------------------


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which nobody waits for."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


REFUSED = failed("Invalid job id specified for job 999999", "scontrol")


def test_requeue(slurm: Callable[..., Slurm], pauses: list[float]) -> None:
    made = slurm()
    assert commands.requeue("7") == []
    assert made.calls == [("scontrol", "requeue", "7")]
    assert pauses == []


def test_requeue_is_tried_for_minutes(
    slurm: Callable[..., Slurm], pauses: list[float]
) -> None:
    made = slurm(scontrol=failed(NO_CONTROLLER), squeue=failed(NO_CONTROLLER))
    with pytest.raises(SlurmftError, match="Unable to contact"):
        commands.requeue("7")
    assert pauses == [1, 5, 15, 30, 60]  # more and more patient
    assert made.calls.count(("scontrol", "requeue", "7")) == 6


def test_requeue_succeeds_when_the_controller_is_back(
    slurm: Callable[..., Slurm], pauses: list[float]
) -> None:
    made = slurm(scontrol=[REFUSED, REFUSED, ""], squeue="RUNNING|None\n")
    assert commands.requeue("7") == []
    assert made.asked == ["scontrol requeue", "squeue"] * 2 + ["scontrol requeue"]
    assert pauses == [1, 5]


@pytest.mark.parametrize(
    ("state", "tries"),
    [("PENDING", 1), ("COMPLETING", 1), ("REQUEUED", 1), ("REQUEUE_HOLD", 1), ("REQUEUE_FED", 1),
     ("RUNNING", 6), ("SUSPENDED", 6)],
)  # fmt: skip
def test_requeue_of_what_somebody_else_has_requeued(
    slurm: Callable[..., Slurm], pauses: list[float], state: str, tries: int
) -> None:
    made = slurm(scontrol=REFUSED, squeue=f"{state}|None\n")
    if tries > 1:
        with pytest.raises(SlurmftError, match="Invalid job id"):
            commands.requeue("7")
    else:
        assert commands.requeue("7") == []
    assert made.asked.count("scontrol requeue") == tries


def test_requeue_without_hosts(
    slurm: Callable[..., Slurm], pauses: list[float]
) -> None:
    made = slurm()
    assert commands.requeue("7", ["n1", "n3"], mem_mib=1536) == []
    assert made.calls == [
        ("scontrol", "requeue", "7"),
        ("scontrol", "update", "JobId=7", "ExcNodeList=n1,n3"),
        ("scontrol", "update", "JobId=7", "MinMemoryNode=1536"),
    ]
    runs_again = failed("Job is no longer pending execution", "scontrol")
    slurm(scontrol=["", runs_again, runs_again])
    why = "scontrol failed (exit 1): Job is no longer pending execution"
    assert commands.requeue("7", ["n1"], mem_mib=1536) == [
        f"n1 could not be excluded: {why}",
        f"the job gets no more memory: {why}",
    ]


# --- the cluster ----------------------------------------------------------------------------------


def test_settings(slurm: Callable[..., Slurm]) -> None:
    text = """\
Configuration data as of 2026-11-22T21:02:30
AccountingStorageHost   = login
BatchStartTimeout       = 15 sec
BurstBufferType         = (null)
SlurmctldParameters     =
ClusterName             = slurmft
MaxArraySize            = 1001
"""
    made = slurm(scontrol=text)
    assert commands.settings() == {
        "AccountingStorageHost": "login",
        "BatchStartTimeout": "15 sec",
        "ClusterName": "slurmft",
        "MaxArraySize": "1001",
    }
    assert commands.max_array_size() == 1001
    assert made.calls == [("scontrol", "show", "config")] * 2
    slurm(scontrol=failed(NO_CONTROLLER))
    assert commands.max_array_size() == 1001
    with pytest.raises(SlurmftError):
        commands.settings()


def test_memory_that_so_many_nodes_have(slurm: Callable[..., Slurm]) -> None:
    slurm(sinfo="2|64000\n4|128000+\n")
    sizes = [commands.largest_memory_mib(nodes) for nodes in (1, 4, 5, 6, 7)]
    assert sizes == [128000, 128000, 64000, 64000, 0]
    # Whoever asks is about to requeue a job.
    slurm(sinfo="2|64000\nn/a|n/a\n")
    assert commands.largest_memory_mib(2) == 64000
    slurm(sinfo=failed(NO_CONTROLLER))
    assert commands.largest_memory_mib(1) == 0


def test_partitions(slurm: Callable[..., Slurm]) -> None:
    made = slurm(sinfo="batch|up|1:00:00|1|2\nurgent|up|1:00:00|1|2\n")
    assert [p.name for p in commands.partitions()] == ["batch", "urgent"]
    assert commands.partitions()[0].cpus_per_node == "2"
    assert made.calls[0] == ("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c")
    slurm(sinfo=failed(NO_CONTROLLER))
    assert commands.partitions() == []


def test_version(slurm: Callable[..., Slurm]) -> None:
    slurm(sinfo="slurm-wlm 22.05.8\n")
    assert commands.version() == "slurm-wlm 22.05.8"


def test_unwell_hosts(slurm: Callable[..., Slurm]) -> None:
    text = "n1|idle|none\nn1|idle|none\nn2|down*|Not responding\nn3|drained|bad disk | old\n"
    text += "n4|mixed|none\nn5|idle*|none\nn6|unknown|none\nn7|failing|none\nn8|allocated|none\n"
    slurm(sinfo=text)
    assert commands.unwell_hosts() == {
        "n2": "down*: Not responding",
        "n3": "drained: bad disk | old",
        "n5": "idle*",
        "n6": "unknown",
        "n7": "failing",
    }


def test_down_hosts(slurm: Callable[..., Slurm]) -> None:
    made = slurm(
        sinfo="n2|down*|none\nn2|down*|none\nn1|down|bad disk\nn3|idle|none\nn4|drained|none\n"
        "n5|mixed*|none\nn6|mixed|none\nn7|down*|Not responding\n"
    )
    assert commands.down_hosts(["n1", "n2", "n3"]) == ["n1", "n2", "n5", "n7"]
    assert "--nodes=n1,n2,n3" in made.calls[0]
    slurm(sinfo=failed(NO_CONTROLLER))
    assert commands.down_hosts(["n1"]) == []


def test_associations(slurm: Callable[..., Slurm]) -> None:
    made = slurm(sacctmgr="root||normal|||||\nproj||long|4||cpu=8||\n\n")
    assert commands.associations("ada") == [
        {"Account": "root", "QOS": "normal"},
        {"Account": "proj", "QOS": "long", "MaxJobs": "4", "MaxTRES": "cpu=8"},
    ]
    assert "user=ada" in made.calls[0]


def test_accounting_answers_or_not(slurm: Callable[..., Slurm]) -> None:
    slurm()
    commands.check_accounting()
    slurm(sacct=failed(NO_DATABASE, "sacct"))
    with pytest.raises(SlurmftError, match="Connection refused"):
        commands.check_accounting()


def test_cancel(slurm: Callable[..., Slurm]) -> None:
    made = slurm()
    commands.cancel("7", "8_3")
    assert made.calls == [("scancel", "7", "8_3")]


def test_facts_of_a_job(slurm: Callable[..., Slurm]) -> None:
    text = """\
JobId=5 JobName=j.sh
   JobState=RUNNING Reason=None Dependency=(null)
   NumNodes=2 NumCPUs=4 MinMemoryNode=0 Features=(null) Deadline=N/A
   Command=/home/ada/a b=c 60
   WorkDir=/home/ada/x=y
   StdErr=/dev/null
   StdIn=/dev/null
   StdOut=/dev/null
   Comment=a=b
   Power=
"""
    made = slurm(scontrol=text)
    free = {
        "JobId": "5 JobName=j.sh", "Command": "/home/ada/a b=c 60", "WorkDir": "/home/ada/x=y",
        "Comment": "a=b", **dict.fromkeys(("StdErr", "StdIn", "StdOut"), "/dev/null"),
    }  # fmt: skip
    assert commands.job_facts("5") == free | {
        "JobState": "RUNNING", "Reason": "None", "NumNodes": "2", "NumCPUs": "4",
        "MinMemoryNode": "0",
    }  # fmt: skip
    assert made.calls == [("scontrol", "show", "job", "5")]


def test_a_job_that_never_starts(slurm: Callable[..., Slurm]) -> None:
    sinfo = "batch|up|1:00:00|2|4\n"
    made = slurm(squeue="PENDING|PartitionConfig|batch|3|10:00|3\n", sinfo=sinfo)
    assert commands.never_starts("5") == (
        "it requests 3 nodes, but the partition batch has 2 (PartitionConfig)"
    )
    assert "--jobs=5" in made.calls[0]
    slurm(squeue="PENDING|PartitionTimeLimit|batch|2|1:00:01|2\n", sinfo=sinfo)
    assert commands.never_starts("5") == (
        "it requests a time of 1:00:01, but the partition batch allows 1:00:00 (PartitionTimeLimit)"
    )
    slurm(squeue="PENDING|Priority|batch|2|1:00:00|2\n", sinfo=sinfo)
    assert commands.never_starts("5") is None
    slurm(squeue=failed(NO_CONTROLLER), sinfo=sinfo)
    assert commands.never_starts("5") is None
    slurm(squeue="PENDING|Priority|other|9|1:00:00|9\n", sinfo=sinfo)
    assert commands.never_starts("5") is None


def test_a_job_that_never_starts_is_cancelled(slurm: Callable[..., Slurm]) -> None:
    made = slurm(
        squeue="PENDING|PartitionConfig|batch|3|10:00|3\n",
        sinfo="batch|up|1:00:00|2|4\n",
    )
    with pytest.raises(
        SlurmftError, match="never start the job: it requests 3 nodes"
    ) as caught:
        commands.check_starts("5")
    assert caught.value.code == Exit.SUBMIT
    assert "partitions here: batch" in str(caught.value.hint)
    assert ("scancel", "5") in made.calls


def test_errors_without_their_prefixes() -> None:
    lines: Sequence[str] = [
        "sbatch: error: Batch job submission failed: x ",
        "error: y",
        "z",
    ]
    assert commands.error_text(lines) == ["Batch job submission failed: x", "y", "z"]


def test_name_of_the_cluster(
    slurm: Callable[..., Slurm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a job's environment, else by the controller, once."""
    made = slurm(scontrol="ClusterName             = Gamma\n")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    commands._name_by_controller.cache_clear()
    monkeypatch.setattr(commands, "available", lambda: False)
    assert commands.cluster_name() == ""  # nobody is asked where there is no Slurm
    assert made.calls == []
    monkeypatch.setattr(commands, "available", lambda: True)
    assert [commands.cluster_name(), commands.cluster_name()] == ["gamma", "gamma"]
    assert len(made.calls) == 1
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "Delta")
    assert commands.cluster_name() == "delta"
    monkeypatch.setenv("SLURM_CLUSTERS", "Epsilon")
    assert commands.cluster_name() == "epsilon"
    commands._name_by_controller.cache_clear()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, ""),
        ({"SLURM_CLUSTERS": "a"}, ""),
        ({"SLURM_CLUSTERS": "a", "SBATCH_CLUSTERS": "a"}, ""),
        ({"SLURM_CLUSTERS": "a,b"}, "names several clusters"),
        ({"SLURM_CLUSTERS": "all"}, "names several clusters"),
        ({"SBATCH_CLUSTERS": "b"}, "nothing would find the job"),
    ],
)
def test_one_cluster_for_all_of_slurms_commands(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not message:
        commands.check_cluster()
        return
    with pytest.raises(UsageError, match=message):
        commands.check_cluster()


def test_words_that_are_left_with_a_job(slurm: Callable[..., Slurm]) -> None:
    slurm(
        scontrol="JobId=5 JobName=x\n   Comment=slurmft: the disk is full \n   Power=\n"
    )
    assert commands.noted("5") == "the disk is full"
    slurm(scontrol="JobId=5 JobName=x\n   Comment=of the user\n   Power=\n")
    assert commands.noted("5") == ""
    slurm(scontrol=failed(NO_CONTROLLER, "scontrol"))
    assert commands.noted("5") == ""


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        ("9:59|2026-11-27T14:09:59\n", 599),
        ("1:00:00|2026-11-27T15:00:00\n", 3600),
        ("2-12:00:01|2026-11-30T02:00:01\n", 216_001),
        # It is preempted, and has its GraceTime.
        ("1:00:00|2026-11-27T14:00:20\n", 20),
        # The clock of the node is slow.
        ("9:59|2026-11-27T14:30:00\n", 599),
        ("9:59|NONE\n", 599),
        ("UNLIMITED|NONE\n", None),
        ("INVALID|N/A\n", None),
        ("", None),
    ],
)
def test_how_long_a_job_has(text: str, left_s: int | None) -> None:
    now = datetime.datetime(2026, 11, 27, 14)
    assert commands.parse_time_left(text, now) == left_s


@pytest.mark.processes
def test_what_slurm_prints_may_be_any_bytes_and_can_be_recorded(tmp_path: Path) -> None:
    command = ["printf", r"down: a\377b"]
    done = commands._run(command, 30, "", os.environ)
    write_json(tmp_path / "state.json", {"reason": done.stdout})
    assert read_json(tmp_path / "state.json") == {"reason": r"down: a\xffb"}
