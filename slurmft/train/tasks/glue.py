"""The tasks of GLUE (nyu-mll/glue): sentences and pairs of them, with GLUE's own metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmft.train.config import TrainConfig
from slurmft.train.data import TokenData
from slurmft.train.evaluation import check_numbers
from slurmft.train.metrics import SCORES
from slurmft.train.recipes import TASKS
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.rows import label_ids, label_numbers
from slurmft.train.tasks.sequence import Texts

HUB_IDS = ("glue", "nyu-mll/glue")


@dataclass(frozen=True, slots=True)
class Glue:
    """What sets one of the tasks apart."""

    labels: tuple[str, ...]
    """Names of the classes; none: the labels are numbers."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first one decides which checkpoint is the best."""


GLUE = {
    "cola": Glue(("unacceptable", "acceptable"), ("matthews_correlation",)),
    "sst2": Glue(("negative", "positive")),
    "mrpc": Glue(("not_equivalent", "equivalent"), ("f1", "accuracy")),
    "qqp": Glue(("not_duplicate", "duplicate"), ("f1", "accuracy")),
    "stsb": Glue((), ("pearson", "spearman")),
    "mnli": Glue(("entailment", "neutral", "contradiction")),
    "qnli": Glue(("entailment", "not_entailment")),
    "rte": Glue(("entailment", "not_entailment")),
    "wnli": Glue(("not_entailment", "entailment")),
}


class Task(Texts):
    """One of GLUE's tasks: the one that the configuration names."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.glue = GLUE[config.task]
        self.hub_subset = config.task if config.data in HUB_IDS else None
        if not self.glue.labels:
            self.prediction_dtype = np.dtype(np.float64)
        # "", or of MNLI's two validations: "_matched", "_mismatched".
        splits = TASKS[config.task].splits[1:]
        self.suffixes = [split.removeprefix("validation") for split in splits]
        self.metric_names = tuple(m + s for s in self.suffixes for m in self.glue.metrics)

    def label_names(self, train: Rows) -> list[str]:
        return list(self.glue.labels)

    def labels(self, rows: Rows, names: list[str]) -> list[Any]:
        assert self.config.label_column is not None  # from the recipe
        values = rows.column(self.config.label_column)
        return label_ids(values, names, rows.where) if names else label_numbers(values, rows.where)

    def predict(self, output: Any, samples: np.ndarray, data: TokenData) -> Any:
        """Classes as int64, or numbers as float64: (batch,)."""
        if self.glue.labels:
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
            for metric in self.glue.metrics
        }
