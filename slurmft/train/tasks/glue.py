"""The tasks of GLUE (nyu-mll/glue): sentences and pairs of them, with GLUE's own metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from slurmft.train.config import TrainConfig
from slurmft.train.data import TokenData
from slurmft.train.evaluation import check_numbers
from slurmft.train.metrics import SCORES
from slurmft.train.recipes import TASKS
from slurmft.train.tasks.sequence import Texts

HUB_IDS = ("glue", "nyu-mll/glue")


METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation",),
    "mrpc": ("f1", "accuracy"),
    "qqp": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
}
"""The first one decides which checkpoint is the best. Of all other tasks: accuracy."""


class Task(Texts):
    """One of GLUE's tasks: the one that the configuration names."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.metrics = METRICS.get(config.task, ("accuracy",))
        self.hub_subset = config.task if config.data in HUB_IDS else None
        if not TASKS[config.task].labels:
            self.prediction_dtype = np.dtype(np.float64)
        # "", or of MNLI's two validations: "_matched", "_mismatched".
        splits = TASKS[config.task].splits[1:]
        self.suffixes = [split.removeprefix("validation") for split in splits]
        self.metric_names = tuple(m + s for s in self.suffixes for m in self.metrics)

    def predict(self, output: Any, samples: np.ndarray, data: TokenData) -> Any:
        """Classes as int64, or numbers as float64: (batch,)."""
        if TASKS[self.config.task].labels:
            return super().predict(output, samples, data)
        return output.logits.squeeze(-1).double()

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """The metrics of every validation split."""
        check_numbers(predictions)
        ends = np.cumsum(data.sizes)[:-1]
        parts = zip(
            self.suffixes,
            np.split(predictions, ends),
            np.split(data.validation.labels, ends),
            strict=True,
        )
        return {
            metric + suffix: SCORES[metric](predicted, labels)
            for suffix, predicted, labels in parts
            for metric in self.metrics
        }
