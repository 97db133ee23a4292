"""Tasks: rows -> tokens, a model, a metric. Their defaults are in `slurmft.train.recipes`."""

from __future__ import annotations

import importlib

from slurmft.train.config import TrainConfig
from slurmft.train.recipes import TASKS
from slurmft.train.tasks.base import Task


def get(config: TrainConfig) -> Task:
    """The task that a configuration names."""
    module, _, name = TASKS[config.task].implementation.partition(":")
    task: Task = getattr(importlib.import_module(f"slurmft.train.tasks.{module}"), name)(config)
    return task
