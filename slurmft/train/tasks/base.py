"""A task: rows -> tokens, a model, a loss, predictions, metrics."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slurmft.train import own_task
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.task_facts import TaskDeclaration
from slurmft.train.tasks.evaluate_metrics import MetricInputs, class_inputs
from slurmft.train.tasks.metrics import NAN, SCORES, by_class, check_numbers

if TYPE_CHECKING:
    import torch


class Evaluated(NamedTuple):
    """What is computed of a batch of validation samples."""

    predictions: Any
    """Of each sample: (batch, *prediction_shape)."""
    loss: Any = 0.0
    """The sum of the loss over its terms, as `Task.loss` has it: a number or a tensor."""
    terms: Any = 0
    """How many terms these are; 0: there is no loss."""


class Task(TaskDeclaration):
    """Base class of tasks, all that the training loop needs of one.

    Loss, predictions and metrics are those of a classification, of samples or of tokens, unless a
    subclass has others: cross entropy, the class with the largest logit, its scores.
    """

    metric_suffixes: tuple[str, ...] = ("",)
    """What the names of the metrics of each validation split end with."""
    lower_is_better: bool = False
    """The best value of the first metric is the lowest."""
    prediction_dtype: np.dtype[Any] = np.dtype(np.int64)
    """Type of one prediction: int64 for classes, float64 for numbers."""
    prediction_shape: tuple[int, ...] = ()
    """Shape of one prediction: () where it is one value."""
    evaluates_in_fp32: bool = False
    """Rounded logits would be seen in the metrics, as where a best span is chosen."""
    couples_rows: bool = False
    """The loss of a row depends on all rows of the global batch: training takes `vectors` and
    `coupled_loss`, not `loss`."""

    least_step_rows: int = 1
    """Rows of the smallest optimizer step from which something is learnt; fewer at the end of an
    epoch are left out."""

    class_weights: np.ndarray | None = None
    """Weight of each class in the loss: float32, (classes,). None: all count alike."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.facts = own_task.facts(config.task)
        self.options = own_task.options(type(self), config.task, config.task_option)
        if not self.metric_names:
            self.metric_names = self.facts.metrics_of(config.preset)

    # --- data and model ---------------------------------------------------------------------------

    def sources(self) -> dict[str, Any] | None:
        """Returns all that decides what `prepare` makes, as JSON; None: tokens are not kept for
        later runs. Called on the main rank alone."""
        return None

    @abstractmethod
    def prepare(self) -> TokenData:
        """Reads and tokenizes the data. Called on the main rank alone."""

    @abstractmethod
    def model(self, data: TokenData) -> Any:
        """Returns the model to train, in fp32, on the CPU."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer, for the saved model. Called after `prepare`, where that was."""

    def save_extras(self, folder: Path, model: Any) -> None:
        """Writes what a library needs of the saved model besides weights, configuration and
        tokenizer; here, nothing. Called on the main rank, after training."""

    # --- training ---------------------------------------------------------------------------------

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns a batch of the table with what model and loss need besides."""
        return batch

    def count(self, table: TokenTable, samples: np.ndarray) -> float:
        """Returns the number of terms that the loss of samples, or of rows of them, sums.

        The terms are the samples, or their tokens that have a label, or the weights of their
        classes. Every rank counts those of all ranks, so that the mean is over the global batch.
        """
        if self.class_weights is not None:
            if table.token_labels is None:
                labels = table.labels[samples]
            else:
                labels = table.token_labels[table.places(samples)]
            weights = self.class_weights[labels[labels != IGNORED]]
            return float(weights.sum(dtype=np.float64))
        if table.label_counts is None:
            return len(samples)
        return int(table.label_counts[samples].sum())

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Returns the sum of the loss over its terms in a batch, and their `count`."""
        import torch
        from torch.nn.functional import cross_entropy

        logits = output.logits.flatten(0, -2)
        labels = batch.targets["labels"].flatten()
        has_label = labels != IGNORED
        smoothing = self.config.label_smoothing
        if self.class_weights is None:
            total = cross_entropy(
                logits,
                labels,
                reduction="sum",
                ignore_index=IGNORED,
                label_smoothing=smoothing,
            )
            return total, has_label.sum()
        weights = torch.from_numpy(self.class_weights).to(
            logits.device, non_blocking=True
        )
        # In fp32: the weights are, and torch wants one type.
        total = cross_entropy(
            logits.float(),
            labels,
            weights,
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=smoothing,
        )
        # In fp64, as `count` sums them: both must give the same mean. IGNORED is no index.
        weights_of_labels = weights.double()[labels.clamp_min(0)]
        return total, (weights_of_labels * has_label).sum()

    def vectors(self, output: Any, batch: Batch) -> torch.Tensor:
        """Returns what a coupled loss compares of the rows of a batch: fp32, (rows, ...)."""
        raise NotImplementedError

    def coupled_loss(
        self, vectors: torch.Tensor, first: int, count: int
    ) -> torch.Tensor:
        """Returns the sum of the losses of some rows among all rows of a global batch.

        Args:
            vectors: those of all rows: (rows, ...).
            first: the first of the rows whose losses are summed.
            count: how many these are; they may be none.
        """
        raise NotImplementedError

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        """Returns the predictions of a batch of validation samples, see `predict`, and their loss,
        both of one forward pass."""
        output = model(**batch.inputs)
        loss, terms = self.loss(output, batch)
        return Evaluated(self.predict(output, batch, data), loss, terms)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns predictions of validation samples: (batch, *prediction_shape).

        A sample with NaN among its logits has the class `NAN`, or the number NaN.
        """
        # argmax takes NaN for the largest number.
        logits = output.logits
        has_nan = logits.isnan().any(dim=-1)
        return logits.argmax(dim=-1).masked_fill(has_nan, NAN)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of the predictions of all validation samples, in their order.

        Raises:
            SlurmftError: there is NaN among the predictions.
        """
        check_numbers(predictions)
        labels = data.validation.labels
        return {name: SCORES[name](predictions, labels) for name in self.metric_names}

    def split_loss(
        self,
        predictions: np.ndarray,
        data: TokenData,
        step_rows: int,
    ) -> float | None:
        """Returns the loss of a split whose batches have none, as where rows are coupled; None:
        there is none. Here, the batches have it.

        Args:
            predictions: those of all validation samples, in their order.
            step_rows: rows of an optimizer step.
        """
        return None

    def metric_inputs(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, list[MetricInputs]]:
        """Returns predictions and references for the metrics of --metric, in the forms that
        `evaluate_metrics.examples` has for `TaskFacts.predictions`.

        Returns:
            What the names of a validation split's metrics end with -> its forms.
        """
        labels = data.validation.labels
        if predictions.shape != labels.shape:
            return {"": []}
        return {"": [self.metric_form(predictions, labels, data)]}

    def metric_form(
        self,
        predictions: np.ndarray,
        labels: np.ndarray,
        data: TokenData,
    ) -> MetricInputs:
        """Returns predictions and references as they are; of classes what these are called, where
        that is whole numbers."""
        if data.labels and self.facts.predictions == "classes":
            return class_inputs(predictions.tolist(), labels.tolist(), data.labels)
        return MetricInputs(predictions.tolist(), labels.tolist())

    def by_class(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, dict[str, Any]]:
        """Returns precision and recall of each class, see `metrics.by_class`; none where
        predictions are something else."""
        labels = data.validation.labels
        if not data.labels or predictions.dtype.kind != "i":
            return {}
        # Those of words or of generated texts have another shape than the labels of samples.
        if predictions.shape != labels.shape:
            return {}
        return by_class(predictions, labels, data.labels)


def label_maps(data: TokenData) -> dict[str, Any]:
    """Returns label names as a model's configuration holds them, and of labels that are no texts
    their type."""
    maps: dict[str, Any] = {
        "num_labels": len(data.labels),
        "id2label": dict(enumerate(data.labels)),
        "label2id": {name: i for i, name in enumerate(data.labels)},
    }
    if data.label_type != "str":
        maps["label_type"] = data.label_type
    return maps


def set_dropout_of_modules(model: torch.nn.Module, dropout: float | None) -> None:
    """Sets the dropout probability of a model's modules: no configuration has that of the heads for
    words of decoders, such as Qwen2's. None leaves them."""
    import torch

    if dropout is None:
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout


def set_dropout(model_config: Any, dropout: float | None) -> None:
    """Sets every dropout probability of a model's configuration; None leaves them."""
    if dropout is None:
        return
    for name, value in model_config.to_dict().items():
        is_dropout = "dropout" in name or name.endswith("_pdrop")  # as GPT-2 calls them
        # Some names with "dropout" are lists, or switches as ESM's token_dropout, which stay.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_dropout and (value is None or is_number):
            setattr(model_config, name, dropout)
