"""Ids of jobs as Slurm writes them: "12", or "12_3" for task 3 of the job array 12."""

import re
from collections.abc import Mapping

_ID = re.compile(r"(\d+)(_\d+)?")
_RANGE = re.compile(r"(?<![\d%])(\d+)(?:-(\d+)(?::(\d+))?)?(?=[],%])")
""" "3", "0-2" or "0-8:4", whole: Slurm may cut a long list short ("46,4...]")."""


def is_job_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def array_of(job_id: str) -> str:
    """The job array of a task; of a job that is no task, the job itself."""
    return job_id.partition("_")[0]


def array_task_id(array: str, index: int) -> str:
    return f"{array}_{index}"


def tasks_of(listed: str) -> list[str]:
    """The ids that one of Slurm's lists stands for: "12_[0-2,7%4]" is 12_0, 12_1, 12_2 and 12_7; an
    id that is no list is itself."""
    array, bracket, tasks = listed.partition("_[")
    if not bracket:
        return [listed]
    ranges = ((int(a), int(b or a), int(step or 1)) for a, b, step in _RANGE.findall(tasks))
    return [array_task_id(array, i) for a, b, step in ranges for i in range(a, b + 1, step)]


def own_job_id(environment: Mapping[str, str]) -> str:
    """The id of the job that this process is part of.

    Of an array task by array and index: SLURM_JOB_ID of one of the tasks is the id of the array.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return array_task_id(array, int(task)) if array and task else environment["SLURM_JOB_ID"]
