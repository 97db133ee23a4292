"""What tasks that put a sequence into one of several classes have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from slurmft.config import TrainConfig
from slurmft.data import TokenData
from slurmft.metrics import NAN, check_numbers
from slurmft.scores import SCORES


class Classification:
    """Argmax of the logits, and its scores."""

    metric_names: tuple[str, ...] = ("accuracy",)
    """Names in `slurmft.scores`; the first one decides which checkpoint is the best."""
    prediction_dtype: np.dtype[Any] = np.dtype(np.int64)
    prediction_shape: tuple[int, ...] = ()

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def predict(self, output: Any, samples: np.ndarray, data: TokenData) -> Any:
        """Classes: int64, (batch,); NaN among its logits makes a sample's `NAN`."""
        logits = output.logits
        return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), NAN)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
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
