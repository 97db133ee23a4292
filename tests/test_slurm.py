"""What Slurm's commands print, read."""

from __future__ import annotations

import pytest

from slurmft import slurm
from slurmft.slurm import JobState


def test_squeue() -> None:
    assert slurm.parse_squeue("PENDING|Resources\n") == JobState(name="PENDING", reason="Resources")
    assert slurm.parse_squeue("RUNNING|None\n") == JobState(name="RUNNING")
    assert slurm.parse_squeue("") is None


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
    assert slurm.parse_sacct(text) == state


def test_scontrol() -> None:
    text = "JobId=7 JobName=a b JobState=TIMEOUT Reason=TimeLimit Dependency=(null) ExitCode=0:15 x"
    assert slurm.parse_scontrol(text) == JobState(name="TIMEOUT", reason="TimeLimit", exit_code=143)
    assert slurm.parse_scontrol("nothing") is None


def test_partitions_of_several_node_kinds_are_one() -> None:
    found = slurm.parse_partitions(
        "batch|up|1:00:00|3|4\nbatch|up|1:00:00|1|8\nurgent|down|30:00|2|4\n"
    )
    assert [(p.name, p.nodes, p.state) for p in found] == [
        ("batch", 4, "up"),
        ("urgent", 2, "down"),
    ]
    assert str(found[1]) == "urgent (2 nodes of 4 CPUs, time limit 30:00, down)"


def test_jobs_that_ask_for_more_than_their_partition_has() -> None:
    known = slurm.parse_partitions("batch|up|1:00:00|4|4\nlong|up|infinite|4|4\n")

    def why(text: str) -> str | None:
        return slurm.parse_never_starts(text, known)

    assert "5 nodes, the partition batch has 4" in str(why("PENDING|PartitionConfig|batch|5|10:00"))
    assert "10:00:00" in str(why("PENDING|PartitionTimeLimit|batch|1|10:00:00"))
    # Nodes that are down now, or limits of somebody else: these pass.
    assert why("PENDING|PartitionNodeLimit|batch|4|1:00:00\n") is None
    assert why("PENDING|Priority|long|4|10-00:00:00") is None
    assert why("PENDING|Priority|long|4|UNLIMITED") is None
    assert why("RUNNING|None|batch|4|10:00") is None
    assert why("") is None
