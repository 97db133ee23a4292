"""From flags to the configuration of a training run: recipe, then site file, then flags."""

import dataclasses
import math
import shlex
import warnings
from typing import Any

from slurmft.core import credentials
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.options import build, options
from slurmft.core.site import merge, site_defaults
from slurmft.train import ipex, recipes
from slurmft.train.config import (
    TrainConfig,
    early_stopping_remark,
    evaluation_period,
)
from slurmft.train.login.sentence_modules import LIBRARY
from slurmft.train.login.sources import (
    check_in_cache,
    check_packages,
    check_splits_in_cache,
    localize,
    warn_of_near_folders,
)
from slurmft.train.own_task import facts

OPTIONS = options(TrainConfig) | options(JobConfig)
"""Name -> field of every option of a training run: flags, and keys of the site file."""


def configure(flags: dict[str, Any]) -> RunConfig:
    """Returns the configuration of a run, after a look at its local data.

    Raises:
        UsageError: a value that cannot be right, from whichever source; local data that cannot.
    """
    train, job = resolve(flags)
    if job.container is None:  # which may have what this environment lacks
        check_packages(train)
    if train.ipex:
        ipex.check_device(not _needs_gpus(job))
    # Before the program is made: its paths are those that nodes see.
    train = localize(train)
    # An image may have a cache of its own, and commands of --setup name another one.
    if job.container is None and not job.setup:
        warn_of_near_folders(train)
        check_in_cache(train)
        check_splits_in_cache(train)
    _warn_of_early_stopping(train)
    # As far as flags say it: else each node's hardware decides.
    processes_per_node = job.nproc_per_node or job.gpus_per_node or 1
    processes = job.nodes * processes_per_node
    train.check_processes(processes)
    program = train.program()
    has_modules = facts(train.task).library == LIBRARY
    if program.paths or has_modules:
        # other runs need not wait for it
        from slurmft.train.login import inputs

        checked_inputs = inputs.check(train, processes)
        program = dataclasses.replace(program, inputs=checked_inputs)
    # An image may have what this environment lacks.
    if train.named_metrics and job.container is None:
        from slurmft.train.login import metrics

        metrics.check(train, job.file_locks)
    return RunConfig(program=program, job=job)


def _warn_of_early_stopping(train: TrainConfig) -> None:
    """Warns where --early-stopping does nothing, whatever the number of steps of an epoch."""
    period = evaluation_period(train.evaluate_every)
    if period is None or train.epochs is None:
        return
    number, unit = period
    limit: int | None = train.epochs
    if unit == "steps":
        # Steps are counted in the job; --max-steps bounds them.
        limit = train.max_steps
    if limit is None:
        return
    remark = early_stopping_remark(train, math.ceil(limit / number))
    if remark:
        warnings.warn(remark, SlurmftWarning, stacklevel=3)


def _needs_gpus(job: JobConfig) -> bool:
    """Returns whether a run computes on GPUs, as far as its options tell: "auto" is decided on the
    nodes."""
    if job.profile != "auto":
        return job.profile == "gpu"
    # As the profile of a node with GPUs is chosen.
    takes_gpus = job.backend not in ("gloo", "ccl")
    return job.backend == "nccl" or bool(job.gpus_per_node and takes_gpus)


def resolve(flags: dict[str, Any]) -> tuple[TrainConfig, JobConfig]:
    """Returns the options of the trainer and of the job: flags over the site file over the recipe.

    Raises:
        UsageError: a value that cannot be right.
    """
    given = merge(site_defaults(OPTIONS), flags)
    _check_names_task(given)
    values = recipes.fill(given)
    train = build(TrainConfig, values)
    job = with_absolute_paths(build(JobConfig, values))
    return train, job


def _check_names_task(given: dict[str, Any]) -> None:
    """Raises UsageError for data without a task.

    The default is a task that generates its data: an error about that one would be about a name
    that nobody has typed.
    """
    is_named = given.get("task") or given.get("recipe")
    data = given.get("data")
    # A password in it has an error of its own, which does not show it.
    if data and not is_named and not credentials.kind_in(str(data)):
        look = shlex.join(["slurmft", "data", str(data)])
        raise UsageError(
            f"--data {data!r} without --task: nothing says what is to be learnt from it",
            f"--task text-classification, if each text has one label; a look at it: {look}; "
            "all tasks: slurmft help tasks",
        )
