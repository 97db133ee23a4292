"""Rows -> tokens -> batches.

Tokens of a split lie in one flat array on disk, memory-mapped by every rank. The order of the
samples belongs to the global batch: which samples make up a step does not depend on how many
ranks share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray


SPAN = ("start_positions", "end_positions")
"""A model's inputs for labels that are spans: the places of an answer's first and last token."""
BUCKET_STEPS = 50
"""Steps whose samples are sorted by length together."""
TARGETS = ("labels", *SPAN)
"""The inputs of a batch that a model learns from, and that predicting needs not."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The samples of one split."""

    tokens: Array
    """All token ids, one sample after another: int32, (total,)."""
    offsets: Array
    """Sample i is tokens[offsets[i]:offsets[i + 1]]: int64, (samples + 1,)."""
    labels: Array
    """Classes: int64, (samples,). Numbers: float64, (samples,). Spans: int64, (samples, 2)."""
    types: Array | None = None
    """Which of two texts a token is of: int8, (total,). None: they are of one."""
    extra: dict[str, Array] = field(default_factory=dict)
    """What else a task wants to know of its tokens or samples."""

    @classmethod
    def build(
        cls,
        samples: Iterable[Sequence[int] | Array],
        labels: Sequence[Any],
        types: Iterable[Sequence[int] | Array] | None = None,
        **extra: Array,
    ) -> TokenTable:
        """A table from the token ids of every sample, its labels, and its tokens' types."""
        tokens = [np.asarray(sample, dtype=np.int32) for sample in samples]
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        kinds = np.concatenate([np.asarray(t, dtype=np.int8) for t in types]) if types else None
        if kinds is not None and not kinds.any():
            kinds = None  # what models take where they are given none
        return cls(np.concatenate(tokens), offsets_of(lengths), np.asarray(labels), kinds, extra)

    def __len__(self) -> int:
        return len(self.labels)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        types = {} if self.types is None else {"types": self.types}
        own = {name: getattr(self, name) for name in ("tokens", "offsets", "labels")}
        for name, array in (own | types | self.extra).items():
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Memory-maps a saved table: the ranks of a node share its pages."""
        arrays = {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
            for path in folder.glob("*.npy")
        }
        tokens, offsets, labels = (arrays.pop(name) for name in ("tokens", "offsets", "labels"))
        return cls(tokens, offsets, labels, arrays.pop("types", None), arrays)

    def lengths(self, indices: Array) -> Array:
        """Tokens of the samples at `indices`: int64, (batch,)."""
        lengths: Array = self.offsets[indices + 1] - self.offsets[indices]
        return lengths

    def batch(self, indices: Array, pad_id: int, multiple: int = 1, least: int = 0) -> Batch:
        """The samples at `indices`, padded to the longest (rounded up to a multiple).

        Args:
            indices: int64, (batch,); at least one.
            pad_id: token id of the padding.
            multiple: the padded length is a multiple of this; tensor cores like 8.
            least: the padded length is at least this.
        """
        lengths = self.lengths(indices)
        width = max(-(-int(lengths.max()) // multiple) * multiple, least)
        mask = np.arange(width) < lengths[:, None]
        inputs = {
            "input_ids": torch.from_numpy(self.padded(self.tokens, indices, width, pad_id)),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        if self.types is not None:
            inputs["token_type_ids"] = torch.from_numpy(self.padded(self.types, indices, width, 0))
        inputs |= self._targets(indices)
        return Batch(inputs, len(indices), int(lengths.sum()), mask.size)

    def padded(self, values: Array, indices: Array, width: int, fill: int) -> Array:
        """A value of every token of the samples at `indices`: int64, (batch, width).

        Args:
            values: one of every token of the table, (total,).
            indices: int64, (batch,).
            width: at least the length of the longest.
            fill: what stands behind a sample's last token.
        """
        starts, lengths = self.offsets[indices], self.lengths(indices)
        rows = np.full((len(indices), width), fill, dtype=np.int64)
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows[np.arange(width) < lengths[:, None]] = values[np.repeat(starts, lengths) + within]
        return rows

    def _targets(self, indices: Array) -> dict[str, torch.Tensor]:
        labels = torch.from_numpy(self.labels[indices])
        if labels.ndim == 2:
            return dict(zip(SPAN, labels.unbind(1), strict=True))
        return {"labels": labels.float() if labels.is_floating_point() else labels}


@dataclass(frozen=True, slots=True)
class Batch:
    """Model inputs of shape (samples, length), and what they hold."""

    inputs: dict[str, torch.Tensor]
    samples: int
    tokens: int
    padded_tokens: int

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        return {k: v.to(device, non_blocking=True) for k, v in self.inputs.items()}


@dataclass(frozen=True, slots=True)
class TokenData:
    """What a task prepares once, and every rank reads."""

    train: TokenTable
    validation: TokenTable
    labels: list[str]
    """Label names by label id; none where labels are numbers or spans."""
    pad_id: int
    sizes: tuple[int, ...] = ()
    """Samples of each validation split, where there are several: one lies after the other."""
    texts: Any = None
    """What computing the metrics needs besides: whatever JSON can hold; None after `load`."""
    folder: Path | None = None
    """Where it was loaded from."""

    def read_texts(self) -> Any:
        """The texts: they stay on disk until then, as one rank alone wants them."""
        if self.folder is None:
            return self.texts
        return json.loads((self.folder / "texts.json").read_text(encoding="utf-8"))

    def save(self, folder: Path) -> None:
        self.train.save(folder / "train")
        self.validation.save(folder / "validation")
        meta = {"labels": self.labels, "pad_id": self.pad_id, "sizes": self.sizes}
        for name, value in (("meta", meta), ("texts", self.texts)):
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenData:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train, validation = (TokenTable.load(folder / s) for s in ("train", "validation"))
        sizes = tuple(meta.get("sizes", ()))
        return cls(train, validation, meta["labels"], meta["pad_id"], sizes, folder=folder)


def offsets_of(lengths: Array) -> Array:
    """Start of every sample in a flat array, and the end of the last."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


# --- the order of samples -------------------------------------------------------------------------


def epoch_order(samples: int, seed: int, epoch: int) -> Array:
    """The order of an epoch: a permutation that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def bucket_by_length(order: Array, lengths: Array, size: int, seed: int, epoch: int) -> Array:
    """Length bucketing: an order in which the samples of a step have similar lengths.

    Within buckets of `BUCKET_STEPS` steps samples are sorted by length; then the steps are
    shuffled, so that lengths do not grow through a bucket. The step with too few samples stays the
    last.

    Args:
        order: the order of the epoch: int64, (samples,).
        lengths: tokens of every sample of the split: int64, (samples,).
        size: samples of a step.
    """
    bucket = BUCKET_STEPS * size
    steps = []
    for start in range(0, len(order), bucket):
        part = order[start : start + bucket]
        part = part[np.argsort(lengths[part], kind="stable")]
        steps += [part[i : i + size] for i in range(0, len(part), size)]
    whole = len(order) // size
    shuffled = np.random.default_rng([seed, epoch, 1]).permutation(whole).tolist()
    return np.concatenate([steps[i] for i in [*shuffled, *range(whole, len(steps))]])
