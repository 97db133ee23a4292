"""Tasks: rows -> tokens, a model, a metric. Their defaults are in `slurmft.recipes`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slurmft.config import TrainConfig
from slurmft.data import TokenData


class Task(Protocol):
    """What the training loop needs of a task; the class `Task` of its module."""

    metric_names: tuple[str, ...]
    """The first one decides which checkpoint is the best."""
    prediction_dtype: np.dtype[Any]
    """Of one prediction: int64 classes, or float64 numbers."""

    def __init__(self, config: TrainConfig) -> None: ...

    def prepare(self) -> TokenData:
        """Reads and tokenizes the data. Called on the main rank alone."""

    def model(self, data: TokenData) -> Any:
        """The model to train, in fp32, on the CPU."""

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer, for the saved model. Called after `prepare`, where that was."""

    def predict(self, logits: Any) -> Any:
        """From logits (batch, ...) to predictions: (batch,)."""

    def compute(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """The metrics of all predictions; both (samples,), in any order."""


def get(config: TrainConfig) -> Task:
    """The task that a configuration names."""
    task: Task = importlib.import_module(f"slurmft.tasks.{config.task}").Task(config)
    return task
