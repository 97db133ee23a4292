"""The tokens of a run: those that an earlier run made of the same, or new ones."""

import dataclasses
from pathlib import Path
from typing import Any

from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.job import Job
from slurmft.runs import token_cache
from slurmft.train import tasks
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.sources import may_have_test


def fill(folder: Path, task: tasks.Task, job: Job) -> None:
    """Writes the tokens of all splits, and the tokenizer. On the main rank."""
    _fill_train_and_validation(folder, task, job)
    if may_have_test(task.config):
        _fill_test(folder, task, job)


def _fill_train_and_validation(folder: Path, task: tasks.Task, job: Job) -> None:
    cache = token_cache.folder()
    sources = task.sources()
    key = token_cache.key_of(sources) if sources else None
    if key and _take_kept(cache, key, folder, job):
        return
    task.prepare().save(folder)
    task.save_tokenizer(folder / "tokenizer")
    if not key:
        return
    try:
        token_cache.keep(cache, key, folder)
    except (OSError, SlurmftError) as error:
        job.say(f"the tokens cannot be kept in {cache}: {one_line(error)}")


def _take_kept(cache: Path, key: str, folder: Path, job: Job) -> bool:
    """Takes the tokens that an earlier run kept. Returns whether there were any that are whole."""
    try:
        if token_cache.take(cache, key, folder):
            job.say(f"tokens: those of {cache / key}")
            return True
    except token_cache.DamagedError as error:
        job.warn(f"kept tokens were damaged, and are made again: {error}")
    except SlurmftError as error:
        job.say(f"kept tokens are not used: {error.message}")
    return False


def _fill_test(folder: Path, task: tasks.Task, job: Job) -> None:
    """Writes the tokens of a test split, if there is one with labels."""
    # The task again, whose only split is the test split: what it reads as its validation data.
    test: Any = tasks.get(task.config)
    test.facts = dataclasses.replace(test.facts, splits=("test", "test"))
    # Class numbers are those of the training data, also where a class is absent here.
    test.known_labels = TokenData.load(folder).labels or None
    try:
        test.prepare().save(folder / "test")
    except UsageError as error:
        # Most data sets have none; then nobody needs to hear of it.
        if "has no test" not in error.message:
            job.warn(f"the test split is not evaluated: {error.message}")
