"""What a task is: rows -> tokens, a model, a loss, predictions, metrics."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmft.train import own_task
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.own_task import facts
from slurmft.train.task_facts import TaskDeclaration
from slurmft.train.tasks.metrics import NAN, SCORES, by_class, check_numbers

if TYPE_CHECKING:
    import torch


class Task(TaskDeclaration):
    """What the training loop needs of a task. Loss, predictions and metrics are those of a
    classification here, of samples or of tokens: cross entropy, argmax of the logits, its scores.
    """

    metric_names: tuple[str, ...] = ("accuracy",)
    """The first one decides which checkpoint is the best."""
    lower_is_better: bool = False
    """Of the first metric."""
    prediction_dtype: np.dtype[Any] = np.dtype(np.int64)
    """Of one prediction: int64 classes, or float64 numbers."""
    prediction_shape: tuple[int, ...] = ()
    """Of one prediction: () where it is one value."""
    evaluates_in_fp32: bool = False
    """Whether rounded logits would be seen in the metrics, as where a best span is chosen."""

    class_weights: np.ndarray | None = None
    """Of each class in the loss: float32, (classes,). None: all count alike."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.facts = facts(config.task)
        self.options = own_task.options(type(self), config.task, config.task_option)

    def sources(self) -> dict[str, Any] | None:
        """All that decides what `prepare` makes, as JSON; None: that is not worth keeping. Called
        on the main rank alone."""
        return None

    @abstractmethod
    def prepare(self) -> TokenData:
        """Reads and tokenizes the data. Called on the main rank alone."""

    @abstractmethod
    def model(self, data: TokenData) -> Any:
        """The model to train, in fp32, on the CPU."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer, for the saved model. Called after `prepare`, where that was."""

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """What the model takes and the loss compares with, from what the table has for it."""
        return batch

    def count(self, table: TokenTable, samples: np.ndarray) -> float:
        """The terms that the loss of these samples sums: they themselves, or their tokens that have
        a label, or the weights of their classes. Every rank knows them of all, so that the mean is
        over the global batch."""
        if self.class_weights is not None:
            own = table.labels[samples]
            if table.token_labels is not None:
                own = table.token_labels[table.places(samples)]
            return float(self.class_weights[own[own != IGNORED]].sum(dtype=np.float64))
        if table.label_counts is None:
            return len(samples)
        return int(table.label_counts[samples].sum())

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The sum of the loss over its terms in a batch, and their `count`."""
        import torch
        from torch.nn.functional import cross_entropy

        logits, labels = output.logits.flatten(0, -2), batch.targets["labels"].flatten()
        has_label, weights = labels != IGNORED, None
        if self.class_weights is not None:
            weights = torch.from_numpy(self.class_weights).to(logits.device, non_blocking=True)
            logits = logits.float()
        total = cross_entropy(logits, labels, weights, reduction="sum", ignore_index=IGNORED)
        if weights is None:
            return total, has_label.sum()
        return total, (weights.double()[labels.clamp_min(0)] * has_label).sum()

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Any:
        """Predictions of a batch of validation samples; see `predict`."""
        return self.predict(model(**batch.inputs), batch, data)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Predictions of validation samples: (batch, *prediction_shape). Of a sample with NaN among
        its logits: the class `NAN`, or NaN."""
        logits = output.logits
        return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), NAN)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """The metrics of the predictions of all validation samples, in their order; SlurmftError
        where there is NaN among them."""
        check_numbers(predictions)
        labels = data.validation.labels
        return {name: SCORES[name](predictions, labels) for name in self.metric_names}

    def by_class(self, predictions: np.ndarray, data: TokenData) -> dict[str, dict[str, Any]]:
        """Precision and recall of each class, see `metrics.by_class`; none where predictions are
        something else."""
        labels = data.validation.labels
        if not data.labels or predictions.shape != labels.shape or predictions.dtype.kind != "i":
            return {}
        return by_class(predictions, labels, data.labels)


def label_maps(labels: list[str]) -> dict[str, Any]:
    """Label names as a model's configuration holds them."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }


def set_dropout(model_config: Any, dropout: float | None) -> None:
    """Sets every dropout probability of a model's configuration; None leaves them."""
    if dropout is None:
        return
    for name, value in model_config.to_dict().items():
        is_one = "dropout" in name or name.endswith("_pdrop")  # as GPT-2 calls them
        if is_one and (value is None or isinstance(value, (int, float))):
            setattr(model_config, name, dropout)
