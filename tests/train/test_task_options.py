"""Every option that not all tasks read, asked of every task."""

from __future__ import annotations

import re

import pytest

from slurmft.core.errors import UsageError
from slurmft.core.options import options
from slurmft.train.config import TrainConfig
from slurmft.train.login import sources
from slurmft.train.login.configure import resolve
from slurmft.train.login.formats import format_of
from slurmft.train.recipes import fill, presets
from slurmft.train.task_facts import TASKS

BY_TASK = [name for name, each in options(TrainConfig).items() if each.by_task]
COLUMNS = [name for name in options(TrainConfig) if name.endswith("_column")]
BASE = {"data": "some/data", "model": "some/model"}


def flags_of(task: str) -> dict[str, str]:
    """What a run of the task has to name."""
    if not TASKS[task].splits:
        return {"task": task}
    return {"task": task, **BASE}


@pytest.mark.parametrize("name", BY_TASK)
def test_some_tasks_read_it(name: str) -> None:
    readers = [task for task, facts in TASKS.items() if name in facts.reads]
    assert 0 < len(readers) < len(TASKS)


def test_tasks_read_what_is_declared() -> None:
    for facts in TASKS.values():
        assert set(facts.reads) <= set(BY_TASK)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", BY_TASK)
def test_an_option_that_the_task_does_not_read(name: str, task: str) -> None:
    value: object = 7
    if options(TrainConfig)[name].value_type is str:
        value = "sum: "
    flags = flags_of(task) | {name: value}
    if name in TASKS[task].reads:
        assert getattr(resolve(flags)[0], name) == value
        return
    flag = options(TrainConfig)[name].flag
    message = f"{flag} {value} cannot be used with --task {task}, which does not"
    with pytest.raises(UsageError, match=re.escape(message)):
        resolve(flags)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_the_task_does_not_read(name: str, task: str) -> None:
    """Where it does, it is among the columns of the format, which the task reads."""
    train = TrainConfig(**fill(flags_of(task) | {name: "a_column"}))
    reads = TASKS[task].splits and "a_column" in format_of(train).columns
    if reads:
        sources._check_columns(train)
        return
    with pytest.raises(UsageError) as error:
        sources._check_columns(train)
    flag = options(TrainConfig)[name].flag
    what = f"{flag} a_column cannot be used with --task {task}"
    if len(presets(task)) > 1:
        what += f" --preset {train.preset}"
    assert error.value.message == f"{what}, which does not read it"


def test_a_task_of_the_users_may_read_each() -> None:
    config = TrainConfig(task="my.tasks:Mine", doc_stride=3, num_beams=2)
    assert config.doc_stride == 3
