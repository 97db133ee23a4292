"""Ids of jobs as Slurm writes them: "12", or "12_3" for task 3 of the job array 12."""

import re
from collections.abc import Mapping

_ID = re.compile(r"(\d+)(_\d+)?")
_RANGE = re.compile(r"(?<![\d%])(\d+)(?:-(\d+)(?::(\d+))?)?(?=[],%])")
""" "3", "0-2" or "0-8:4", whole: Slurm may cut a long list short ("46,4...]")."""


def is_job_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def array_of(job_id: str) -> str:
    """Returns the job array of a task; of a job that is no task, the job itself."""
    return job_id.partition("_")[0]


def array_task_id(array: str, index: int) -> str:
    return f"{array}_{index}"


def tasks_of(listed: str) -> list[str]:
    """Returns the ids that one of Slurm's lists stands for: "12_[0-2,7%4]" is 12_0, 12_1, 12_2 and
    12_7. An id that is no list is itself."""
    array, bracket, tasks = listed.partition("_[")
    if not bracket:
        return [listed]
    ids = []
    # What comes after "%" is how many may run at once: `_RANGE` passes it over.
    for first, last, step in _RANGE.findall(tasks):
        # "3" is a range of one; "0-2" has no step.
        begin = int(first)
        end = int(last or first) + 1
        for index in range(begin, end, int(step or 1)):
            ids.append(array_task_id(array, index))
    return ids


def own_job_id(environment: Mapping[str, str]) -> str:
    """Returns the id of the job that this process is part of.

    Of an array task by array and index: SLURM_JOB_ID of one of the tasks is the id of the array.
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return array_task_id(array, int(task))
    return environment["SLURM_JOB_ID"]
