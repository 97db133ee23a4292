"""What Slurm's commands print, read."""

from __future__ import annotations

import pytest

from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import JobState


def test_squeue() -> None:
    assert commands.parse_squeue("PENDING|Resources\n") == JobState(
        name="PENDING", reason="Resources"
    )
    assert commands.parse_squeue("RUNNING|None\n") == JobState(name="RUNNING")
    assert commands.parse_squeue("") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED|0:0\n", JobState(name="COMPLETED")),
        ("FAILED|4:0\n", JobState(name="FAILED", exit_code=4)),
        ("CANCELLED by 1000|0:15\n", JobState(name="CANCELLED", reason="by 1000", exit_code=143)),
        ("REQUEUED|0:0\nCOMPLETED|0:0\n", JobState(name="COMPLETED")),
        ("\n", None),
    ],
)
def test_sacct(text: str, state: JobState | None) -> None:
    assert commands.parse_sacct(text) == state


def test_scontrol() -> None:
    text = "JobId=7 JobName=a b JobState=TIMEOUT Reason=TimeLimit Dependency=(null) ExitCode=0:15 x"
    assert commands.parse_scontrol(text) == JobState(
        name="TIMEOUT", reason="TimeLimit", exit_code=143
    )
    assert commands.parse_scontrol("nothing") is None


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
        why("PENDING|PartitionConfig|batch|5|10:00")
    )
    assert "10:00:00" in str(why("PENDING|PartitionTimeLimit|batch|1|10:00:00"))
    # Nodes that are down now, or limits of somebody else: these pass.
    assert why("PENDING|PartitionNodeLimit|batch|4|1:00:00\n") is None
    assert why("PENDING|Priority|long|4|10-00:00:00") is None
    assert why("PENDING|Priority|long|4|UNLIMITED") is None
    assert why("RUNNING|None|batch|4|10:00") is None
    assert why("") is None


def test_states_of_many_jobs() -> None:
    text = "12_0|RUNNING|2026-11-22T10:00:00|None\n12_1|PENDING|N/A|JobArrayTaskLimit\n"
    text += "13|PENDING|2026-11-22T14:05:00|Resources\n\n"
    found = commands.parse_squeue_jobs(text)
    assert found["12_0"] == JobState(name="RUNNING")
    assert found["12_1"] == JobState(name="PENDING", reason="JobArrayTaskLimit")
    start = "2026-11-22T14:05:00"
    assert found["13"] == JobState(name="PENDING", reason="Resources", expected_start=start)
    assert set(found) == {"12_0", "12_1", "13"}
    ended = commands.parse_sacct_jobs("12_0|REQUEUED|0:0\n12_0|FAILED|4:0\n14|COMPLETED|0:0\n")
    assert ended["12_0"] == JobState(name="FAILED", exit_code=4)


def test_many_jobs_are_asked_for_by_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def call(*command: str) -> str:
        calls.append(command)
        return "12_0|RUNNING|N/A|None\n" if command[0] == "squeue" else "12_1|TIMEOUT|0:0\n"

    monkeypatch.setattr(commands, "call", call)
    found = commands.job_states(["12_0", "12_1", "9_7"])
    assert {job: state.name for job, state in found.items()} == {
        "12_0": "RUNNING",
        "12_1": "TIMEOUT",
    }
    assert [c[0] for c in calls] == ["squeue", "sacct"]
    assert "--jobs=12,9" in calls[0]
    calls.clear()  # of 9_7 only a place in the queue would matter
    commands.job_states(["12_0", "9_7"], only_queued=["9_7"])
    assert [c[0] for c in calls] == ["squeue"]
    assert commands.job_states([]) == {}


def test_max_array_size() -> None:
    assert (
        commands.parse_max_array_size("MaxArraySize            = 4001\nMaxJobCount = 7\n") == 4001
    )
    assert commands.parse_max_array_size("") == 1001
