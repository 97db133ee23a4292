"""Whether a model computes of a text what it computes of the text alone, where padding is in its
batch. Most do: attention leaves padding out. Convolutions, Fourier transforms and hashes may not.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmft.train.data.tables import IGNORED, TokenTable
from slurmft.train.engine.packing import OUTPUTS, difference
from slurmft.train.tasks.base import Task


@dataclass(frozen=True, slots=True)
class Differences:
    """How much outputs for texts differ from those that each text has alone; 0: rounding alone."""

    behind: float
    """With padding behind the texts."""
    before: float | None
    """With padding before them; None: outputs are of tokens, which have their places."""


def try_out(
    model: Any, task: Task, table: TokenTable, most_tokens: int | None, pad_id: int
) -> Differences | None:
    """Tries a model of transformers with the short samples of a table, one by one and together.

    Args:
        most_tokens: of each sample, where each token has a label.

    Returns:
        None where it cannot be tried: training does, or refuses, whatever it cannot compute.
    """
    was_training = model.training
    # Dropout alone would make two outputs of one text differ.
    model.eval()
    try:
        with contextlib.suppress(Exception), torch.no_grad():
            return _differences(_Trial(model, task, table, most_tokens, pad_id))
    finally:
        model.train(was_training)
    return None


def _differences(trial: "_Trial") -> Differences:
    alone = [trial.outputs(np.array([sample])) for sample in trial.samples]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]

    def largest(left: bool) -> float:
        together = trial.outputs(trial.samples, left)
        pairs = zip(expected, together, strict=True)
        return max(difference(*pair) for pair in pairs)

    before = None
    if trial.are_of_texts:
        before = largest(left=True)
    return Differences(largest(left=False), before)


class _Trial:
    """A model, and the samples that it is tried with."""

    def __init__(
        self,
        model: Any,
        task: Task,
        table: TokenTable,
        most_tokens: int | None,
        pad_id: int,
    ) -> None:
        self._model = model
        self._task = task
        self._pad_id = pad_id
        self.are_of_texts = False
        """The outputs that were computed last are one of each text, and not of its tokens."""
        self._has_token_labels = table.token_labels is not None
        self._table = table
        self.samples = table.few_samples()
        if self._has_token_labels:
            self._table = table.few(most_tokens)
            self.samples = np.arange(len(self._table))

    def outputs(self, samples: np.ndarray, left: bool = False) -> list[Tensor]:
        """Returns the outputs for samples in one batch, those of padding left out."""
        batch = self._table.batch(samples, self._pad_id, left=left)
        # Samples may have targets that the model takes, as a decoder. `few` has none.
        if not self._has_token_labels:
            batch = self._task.batch(batch, self._table)
        is_token = batch.inputs["attention_mask"].bool()
        if "decoder_input_ids" in batch.inputs:
            is_token = batch.targets["labels"] != IGNORED
        output = self._model(**batch.to(self._model.device).inputs)
        return list(self._without_padding(output, is_token.cpu()))

    def _without_padding(self, output: Any, is_token: Tensor) -> Iterator[Tensor]:
        self.are_of_texts = False
        for name in OUTPUTS:
            if name not in output:
                continue
            values = output[name].float().cpu()
            if values.shape[: is_token.ndim] == is_token.shape:
                values = values[is_token]
            self.are_of_texts = name == "logits" and output[name].ndim == 2
            yield values
