"""What a task is: rows -> tokens, a model, predictions, metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.train.config import TrainConfig
from slurmft.train.data import TokenData
from slurmft.train.evaluation import NAN, check_numbers
from slurmft.train.metrics import SCORES


class Task(ABC):
    """What the training loop needs of a task. Predictions and metrics are those of a classification
    here: argmax of the logits, and its scores."""

    metric_names: tuple[str, ...] = ("accuracy",)
    """The first one decides which checkpoint is the best."""
    prediction_dtype: np.dtype[Any] = np.dtype(np.int64)
    """Of one prediction: int64 classes, or float64 numbers."""
    prediction_shape: tuple[int, ...] = ()
    """Of one prediction: () where it is one value."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

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

    def predict(self, output: Any, samples: np.ndarray, data: TokenData) -> Any:
        """Predictions of validation samples: (batch, *prediction_shape). Of a sample with NaN among
        its logits: the class `NAN`, or NaN.

        Args:
            output: what the model returned for them.
            samples: which ones: int64, (batch,).
        """
        logits = output.logits
        return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), NAN)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """The metrics of the predictions of all validation samples, in their order.

        Raises:
            SlurmftError: there is NaN among them.
        """
        check_numbers(predictions)
        labels = data.validation.labels
        return {name: SCORES[name](predictions, labels) for name in self.metric_names}


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
        if "dropout" in name and (value is None or isinstance(value, (int, float))):
            setattr(model_config, name, dropout)
