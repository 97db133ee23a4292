"""Tasks: rows -> tokens, a model, a metric. Their defaults are in `slurmft.train.recipes`."""

from __future__ import annotations

import importlib

from slurmft.train.config import TrainConfig
from slurmft.train.recipes import facts
from slurmft.train.tasks.base import Task


def get(config: TrainConfig) -> Task:
    """The task that a configuration names."""
    module = importlib.import_module(f"slurmft.train.tasks.{facts(config.task).module}")
    task: Task = module.Task(config)
    return task
