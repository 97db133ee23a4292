"""Whether a model computes of a text what it computes of the text alone, where padding is in its
batch. Most do: attention leaves padding out. Convolutions, Fourier transforms and hashes may not.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmft.core.errors import one_line
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.engine.evaluating import evaluating
from slurmft.train.engine.packing import OUTPUTS, difference, without_padding
from slurmft.train.tasks.base import Task

_PADDING = 8
"""Places of padding beside the longest sample: where all have one length, there is some, too, as
--batching padded, tensor cores and other splits bring it."""
_MOST_PLACES = 2048
"""Places of the batch that is tried, if two samples have no more: long texts take minutes."""
_LAST_TOKENS = 32
"""Tokens of a text whose outputs are compared, those next to padding: logits of a vocabulary, for
every token, take gigabytes."""


@dataclass(frozen=True, slots=True)
class Differences:
    """How much outputs for texts differ from those that each text has alone; 0: rounding alone."""

    behind: float
    """With padding behind the texts."""
    before: float | None = None
    """With padding before them; None: not tried, as padding behind them changes nothing, or as
    outputs are of tokens, which have their places."""


def try_out(
    model: Any,
    task: Task,
    table: TokenTable,
    most_tokens: int | None,
    pad_id: int,
    most_places: int = sys.maxsize,
) -> Differences | str:
    """Tries a model of transformers with the short samples of a table, one by one and together.

    Args:
        most_tokens: of each sample, where each token has a label; None: all.
        most_places: of a text, that the model has.

    Returns:
        The differences; or why it could not be tried, as a text.
    """
    task_batch = task.batch
    samples = table.few_samples()
    if table.token_labels is not None:
        table = table.few(most_tokens)
        samples = np.arange(len(table))
        # Such a table has no targets for the task to add.
        task_batch = _as_it_is
    samples = _not_too_long(samples, table)
    width = int(table.lengths(samples).max()) + _PADDING

    def outputs(samples: np.ndarray, width: int = 0, left: bool = False) -> _Outputs:
        batch = table.batch(samples, pad_id, 1, width, left, most_places)
        return _Outputs.of(model, task_batch(batch, table))

    try:
        with torch.no_grad(), evaluating(model):
            return _differences(outputs, samples, width)
    # Whatever a model does with such batches, or a task of the user's own.
    except Exception as error:
        return f"{type(error).__name__}: {one_line(error)}"


def _differences(
    outputs: Callable[..., "_Outputs"], samples: np.ndarray, width: int
) -> Differences:
    """Compares outputs of samples, each alone, with those of one batch, so many places wide."""
    alone = [outputs(np.array([sample])) for sample in samples]
    expected = _Outputs.joined(alone)
    behind = expected.difference(outputs(samples, width))
    before = None
    if behind and expected.are_of_texts:
        before = expected.difference(outputs(samples, width, left=True))
    return Differences(behind, before)


def _as_it_is(batch: Batch, table: TokenTable) -> Batch:
    return batch


def _not_too_long(samples: np.ndarray, table: TokenTable) -> np.ndarray:
    """Returns the first samples whose batch is small, at least two; they are in the order of their
    lengths."""
    counts = np.arange(1, len(samples) + 1)
    is_small = table.lengths(samples) * counts <= _MOST_PLACES
    few: np.ndarray = samples[: max(2, int(is_small.sum()))]
    return few


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of a model for some samples, those of padding left out."""

    values: list[Tensor]
    are_of_texts: bool
    """There is one of each text, and not of its tokens."""

    @classmethod
    def of(cls, model: Any, batch: Batch) -> "_Outputs":
        is_compared = batch.inputs["attention_mask"].bool()
        if "decoder_input_ids" in batch.inputs:
            is_compared = batch.targets["labels"] != IGNORED
        tokens_from_here = is_compared.flip(1).cumsum(1).flip(1)
        is_compared &= tokens_from_here <= _LAST_TOKENS
        output = model(**batch.to(model.device).inputs)
        values = []
        for name in sorted(OUTPUTS & output.keys()):
            value = without_padding(name, output[name], is_compared)
            values.append(value.float().cpu())
        are_of_texts = "logits" in output and output["logits"].ndim == 2
        return cls(values, are_of_texts)

    @classmethod
    def joined(cls, parts: list["_Outputs"]) -> "_Outputs":
        each_output = zip(*(part.values for part in parts), strict=True)
        values = [torch.cat(values) for values in each_output]
        return cls(values, parts[0].are_of_texts)

    def difference(self, others: "_Outputs") -> float:
        """Returns the largest difference to other outputs for the same samples."""
        pairs = zip(self.values, others.values, strict=True)
        differences = [difference(*pair) for pair in pairs]
        # Not Python's max, which may pass NaN over.
        return float(np.max(differences))
