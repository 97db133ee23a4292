"""The tokens of a run: those that an earlier run made of the same, or new ones."""

import dataclasses
from pathlib import Path
from typing import Any

from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.job import Job
from slurmft.train import tasks, token_cache
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.sources import NoSplitError, may_have_test


def fill(folder: Path, task: tasks.Task, job: Job) -> None:
    """Writes the tokens of all splits, and the tokenizer. On the main rank."""
    # All that decides the tokens; None: they are not kept for later runs.
    sources = task.sources()
    if not sources:
        _make(folder, task)
    else:
        key = token_cache.key_of(sources)
        if not _take(folder, key, job):
            _make(folder, task)
            _keep(folder, key, job)
    if may_have_test(task.config):
        _make_test(folder, task, job)


def _make(folder: Path, task: tasks.Task) -> None:
    """Writes the tokens of training and validation data."""
    task.prepare().save(folder)
    task.save_tokenizer(folder / "tokenizer")


def _take(folder: Path, key: str, job: Job) -> bool:
    """Takes tokens from the user's cache; returns whether there were any."""
    cache = token_cache.folder()
    try:
        if token_cache.take(cache, key, folder):
            job.say(f"tokens: those of {cache / key}")
            return True
    # A cache is a gain of time alone: whatever is wrong with it, the tokens are made.
    except token_cache.DamagedError as error:
        job.warn(f"kept tokens were damaged, and are made again: {error}")
    except SlurmftError as error:
        job.say(f"kept tokens are not used: {error.message}")
    return False


def _keep(folder: Path, key: str, job: Job) -> None:
    """Keeps tokens in the user's cache. A cache that cannot be written does not end the run."""
    cache = token_cache.folder()
    try:
        token_cache.keep(cache, key, folder)
    except (OSError, SlurmftError) as error:
        job.say(f"the tokens cannot be kept in {cache}: {one_line(error)}")


def _make_test(folder: Path, task: tasks.Task, job: Job) -> None:
    """Writes the tokens of a test split, if there is one with labels."""
    # A task whose training and validation data are both the test split.
    test: Any = tasks.get(dataclasses.replace(task.config, mix=()))
    test.facts = dataclasses.replace(test.facts, splits=("test", "test"))
    test.known_labels = TokenData.load(folder).labels or None
    try:
        test.prepare().save(folder / "test")
    except NoSplitError:
        pass  # it is optional
    except UsageError as error:
        job.warn(f"the test split is not evaluated: {error.message}")
