"""Ids of jobs and of array tasks."""

from __future__ import annotations

import pytest

from slurmft.runs.job_ids import (
    array_of,
    array_task_id,
    is_job_id,
    own_job_id,
    tasks_of,
)


def test_array_tasks_are_named_as_such() -> None:
    """The id of one of them is that of the whole array: requeueing it would requeue all."""
    task = {
        "SLURM_JOB_ID": "40",
        "SLURM_ARRAY_JOB_ID": "40",
        "SLURM_ARRAY_TASK_ID": "2",
    }
    assert own_job_id(task) == array_task_id("40", 2) == "40_2"
    assert own_job_id({"SLURM_JOB_ID": "41"}) == "41"


@pytest.mark.parametrize(
    ("text", "array"), [("41", "41"), ("40_2", "40"), ("40_12", "40")]
)
def test_job_ids(text: str, array: str) -> None:
    assert is_job_id(text)
    assert array_of(text) == array


@pytest.mark.parametrize("text", ["", "last", "4x", "_2", "40_", "emotion-20261120"])
def test_texts_that_are_not_job_ids(text: str) -> None:
    assert not is_job_id(text)


@pytest.mark.parametrize(
    ("listed", "tasks"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[3]", ["12_3"]),
        ("2_[0-2,4-5%4]", ["2_0", "2_1", "2_2", "2_4", "2_5"]),
        ("5_[0-1%12]", ["5_0", "5_1"]),
        ("3_[0-8:4,9]", ["3_0", "3_4", "3_8", "3_9"]),
        ("4_[0-1,4,46,4...]", ["4_0", "4_1", "4_4", "4_46"]),  # cut short by Slurm
    ],
)
def test_tasks_that_slurm_lists_in_one_line(listed: str, tasks: list[str]) -> None:
    assert tasks_of(listed) == tasks
