"""Multi-label classification: texts, or pairs of them, each with any number of classes.

Each class is a decision of its own: its probability is the sigmoid of its logit, and it is
predicted from 0.5 on.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks import sequence
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.metrics import NAN


class Task(sequence.Task):
    """Multi-label classification; labels and predictions are 0 and 1: (samples, classes)."""

    def labels(self, rows: Rows, names: list[str]) -> list[Any]:
        labelled = list(self.form.labels(self.values(rows)))
        # A row has any number of labels: as often its number comes.
        row_numbers = [row for row, _ in labelled]
        labels = [label for _, label in labelled]
        ids = self.class_ids(labels, names, rows, rows.where, row_numbers)
        flags = np.zeros((len(rows), len(names)), dtype=np.int8)
        # Rows are counted from 1. The types, because an array of no numbers would be of floats.
        places = np.array(row_numbers, dtype=np.int64) - 1
        classes = np.array(ids, dtype=np.int64)
        flags[places, classes] = 1
        return list(flags)

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForSequenceClassification

        self.prediction_shape = (len(data.labels),)
        maps = label_maps(data)
        settings = maps | {"problem_type": "multi_label_classification"}
        return self.pretrained(AutoModelForSequenceClassification, **settings)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Returns the mean of the cross entropies of a text's classes; summed over texts."""
        logits = output.logits.float()  # sums of rounded losses would stop growing
        labels = batch.targets["labels"].to(logits.dtype)
        of_classes = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        of_texts = of_classes.mean(dim=1)
        return of_texts.sum(), len(of_texts)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns 0 and 1 of each class: int64, (batch, classes)."""
        has_nan = output.logits.isnan().any(dim=-1, keepdim=True)
        # A sigmoid is 0.5 at 0.
        return (output.logits >= 0).long().masked_fill(has_nan, NAN)
