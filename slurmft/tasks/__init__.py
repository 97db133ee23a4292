"""Tasks: rows -> tokens, a model, a metric. Their defaults are in `slurmft.recipes`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slurmft.config import TrainConfig
from slurmft.data import TokenData
from slurmft.recipes import TASKS


class Task(Protocol):
    """What the training loop needs of a task; the class `Task` of its module."""

    metric_names: tuple[str, ...]
    """The first one decides which checkpoint is the best."""
    prediction_dtype: np.dtype[Any]
    """Of one prediction: int64 classes, or float64 numbers."""
    prediction_shape: tuple[int, ...]
    """Of one prediction: () where it is one value."""

    def __init__(self, config: TrainConfig) -> None: ...

    def sources(self) -> dict[str, Any] | None:
        """All that decides what `prepare` makes, as JSON; None: that is not worth keeping. Called
        on the main rank alone."""

    def prepare(self) -> TokenData:
        """Reads and tokenizes the data. Called on the main rank alone."""

    def model(self, data: TokenData) -> Any:
        """The model to train, in fp32, on the CPU."""

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer, for the saved model. Called after `prepare`, where that was."""

    def predict(self, output: Any, samples: np.ndarray, data: TokenData) -> Any:
        """Predictions of validation samples: (batch, *prediction_shape).

        Args:
            output: what the model returned for them.
            samples: which ones: int64, (batch,).
        """

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """The metrics of the predictions of all validation samples, in their order."""


def get(config: TrainConfig) -> Task:
    """The task that a configuration names."""
    module = importlib.import_module(f"slurmft.tasks.{TASKS[config.task].module}")
    task: Task = module.Task(config)
    return task
