"""Tables of tokens: the samples of a split, in flat arrays on disk; batches of them in memory.

Every rank maps the arrays into memory, so that the ranks of a node share their pages.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray

IGNORED = -100
"""Label of a token that the loss leaves out, as torch's losses know it."""
_FIRST = 64
"""Samples among which short ones are sought that a model is tried out with."""
_FEW = 4
"""Number of these."""
_ARRAYS = ("tokens", "offsets", "labels", "types", "token_labels", "label_counts")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Samples of one split."""

    tokens: Array
    """All token ids, one sample after another: int32, (total,)."""
    offsets: Array
    """Sample i is tokens[offsets[i]:offsets[i + 1]]: int64, (samples + 1,)."""
    labels: Array
    """Of samples, as their task's loss reads them: (samples, ...); (samples, 0) where its tokens
    have labels."""
    types: Array | None = None
    """Number of the text, 0 or 1, that a token is of: int8, (total,). None: each sample is one
    text."""
    token_labels: Array | None = None
    """Of tokens: classes, or the tokens that follow; `IGNORED` where there is none: int32,
    (total,)."""
    label_counts: Array | None = None
    """Number of tokens of each sample that have a label: int64, (samples,). Every rank sums those
    of the whole global batch in every step."""
    extra: dict[str, Array] = field(default_factory=dict)
    """Further arrays that a task wants of its tokens or samples."""

    def __post_init__(self) -> None:
        # A table from disk has the counts: here they would read all its pages.
        if self.token_labels is not None and self.label_counts is None:
            has_label = self.token_labels != IGNORED
            labels_before = np.append(0, np.cumsum(has_label))
            counts = np.diff(labels_before[self.offsets])
            object.__setattr__(self, "label_counts", counts)  # the class is frozen

    @classmethod
    def build(
        cls,
        samples: Iterable[Sequence[int] | Array],
        labels: Sequence[Any] | None = None,
        types: Iterable[Sequence[int] | Array] | None = None,
        token_labels: Iterable[Sequence[int] | Array] | None = None,
        **extra: Array,
    ) -> TokenTable:
        """Builds a table from the token ids of each sample, with its label or those of its tokens.

        Args:
            samples: token ids of each sample.
            labels: a label for each sample, or None.
            types: the number of its text for each token of each sample, or None.
            token_labels: a label for each token of each sample, or None.
            extra: further arrays, by name.
        """
        tokens = [np.asarray(sample, dtype=np.int32) for sample in samples]
        flat_types = _flat(types, np.int8)
        if flat_types is not None and not flat_types.any():
            flat_types = None  # zeros are what models take where they are given none
        lengths = [len(sample) for sample in tokens]
        labels_of_samples: Any = labels
        if labels is None:
            labels_of_samples = np.empty((len(tokens), 0))
        return cls(
            tokens=np.concatenate(tokens),
            offsets=offsets_of(lengths),
            labels=np.asarray(labels_of_samples),
            types=flat_types,
            token_labels=_flat(token_labels, np.int32),
            extra=extra,
        )

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """Returns the samples of all tables, one table after the other, without `extra`."""
        if len(tables) == 1:
            return tables[0]
        arrays: dict[str, Any] = {}
        for name in _ARRAYS:
            parts = [getattr(table, name) for table in tables]
            if name == "types" and any(part is not None for part in parts):
                # A table whose samples are all of one text has none.
                parts = [table._types_or_zeros() for table in tables]
            # All tables are of one task: they have the same other arrays.
            if parts[0] is not None:
                arrays[name] = np.concatenate(parts)
        # Offsets count from the start of their own table: they are made anew.
        lengths = [np.diff(table.offsets) for table in tables]
        arrays["offsets"] = offsets_of(np.concatenate(lengths))
        return cls(**arrays)

    def _types_or_zeros(self) -> Array:
        if self.types is None:
            return np.zeros(len(self.tokens), dtype=np.int8)
        return self.types

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        lengths = np.diff(self.offsets)
        return int(lengths.max())

    def few_samples(self) -> Array:
        """Returns the samples of `few`, the shortest first."""
        lengths = self.lengths(np.arange(min(len(self), _FIRST)))
        if lengths.min() == lengths.max():
            lengths = self.lengths(np.arange(len(self)))
        # A batch of samples of one length has no padding, and would not show what it does.
        _, first_of_length = np.unique(lengths, return_index=True)
        order = np.argsort(lengths, kind="stable")
        others = order[~np.isin(order, first_of_length)]
        samples: Array = np.concatenate([first_of_length, others])[:_FEW]
        return samples[np.argsort(lengths[samples], kind="stable")]

    def few(self, most_tokens: int | None = None) -> TokenTable:
        """Returns short samples of different lengths, without labels, with which a model is tried
        out: the shortest of the first ones.

        Args:
            most_tokens: tokens of each that are kept, the last one among them, for which heads may
                look; None: all.
        """
        tokens = []
        types = []
        for sample in self.few_samples():
            begin, end = self.offsets[sample : sample + 2]
            places = slice(begin, end)
            tokens.append(_cut(self.tokens[places], most_tokens))
            if self.types is not None:
                types.append(_cut(self.types[places], most_tokens))
        return TokenTable.build(tokens, types=types or None)

    # --- on disk ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes each array as a file of a new folder."""
        folder.mkdir()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        arrays |= self.extra
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Memory-maps a saved table."""
        fields: dict[str, Array] = {}
        extra: dict[str, Array] = {}
        for path in folder.glob("*.npy"):
            # Mapped: all ranks of a node share the pages. Pickles would run code.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if path.stem in _ARRAYS:
                fields[path.stem] = array
            else:
                extra[path.stem] = array
        return cls(**fields, extra=extra)

    # --- batches ----------------------------------------------------------------------------------

    def lengths(self, indices: Array) -> Array:
        """Returns the number of tokens of the samples at `indices`: int64, (batch,)."""
        lengths: Array = self.offsets[indices + 1] - self.offsets[indices]
        return lengths

    def batch(
        self,
        indices: Array,
        pad_id: int,
        multiple: int = 1,
        least: int = 0,
        left: bool = False,
        most: int = sys.maxsize,
    ) -> Batch:
        """Returns samples padded to the longest of them.

        Args:
            indices: which samples: int64, (batch,); at least one.
            pad_id: token id of the padding.
            multiple: the padded length is a multiple of this; tensor cores like 8.
            least: the padded length is at least this.
            left: padding is before the samples, not behind them.
            most: the padded length is at most this; no sample is longer.
        """
        lengths = self.lengths(indices)
        # Division of negative numbers rounds up.
        rounded_up = -(-int(lengths.max()) // multiple) * multiple
        width = min(max(rounded_up, least), most)
        mask = _token_mask(lengths, width, left)
        spread = partial(self.padded, indices=indices, width=width, left=left)
        return self._batch(indices, spread, pad_id, attention_mask=mask)

    def packed(self, indices: Array) -> Batch:
        """Returns samples one after another, sorted by length, as (1, tokens)."""
        # Attention pads groups of neighbours to one length.
        by_length = np.argsort(self.lengths(indices), kind="stable")
        indices = indices[by_length]
        places = self.places(indices)
        # The start of its sample, for each token: positions count from there.
        starts = np.repeat(self.offsets[indices], self.lengths(indices))
        positions = places - starts

        def spread(values: Array, fill: int) -> Array:
            in_order: Array = values[places]
            return in_order[None]

        return self._batch(indices, spread, position_ids=positions[None])

    def _batch(
        self,
        indices: Array,
        spread: Callable[..., Array],
        pad_id: int = 0,
        **inputs: Array,
    ) -> Batch:
        """Returns the samples at `indices`.

        Args:
            spread: makes what the model gets from an array of all tokens, and the value that fills
                it up.
            inputs: further inputs of the model.
        """
        import torch  # the login node imports this module for tasks of the user's own

        inputs = {"input_ids": spread(self.tokens, fill=pad_id)} | inputs
        if self.types is not None:
            inputs["token_type_ids"] = spread(self.types, fill=0)
        if self.token_labels is not None:
            labels = spread(self.token_labels, fill=IGNORED)
            labels = np.asarray(labels, np.int64)
        else:
            labels = self.labels[indices]
            # numbers: losses compare them with fp32 logits
            if labels.dtype.kind == "f":
                labels = labels.astype(np.float32)
        tensors = {}
        for name, array in inputs.items():
            # Tables hold int32 to be small; torch's embeddings and losses take int64.
            wide = np.asarray(array, np.int64)
            tensors[name] = torch.from_numpy(wide)
        return Batch(
            inputs=tensors,
            targets={"labels": torch.from_numpy(labels)},
            indices=indices,
            lengths=torch.from_numpy(self.lengths(indices)),
            padded_tokens=inputs["input_ids"].size,
        )

    def padded(
        self,
        values: Array,
        indices: Array,
        width: int,
        fill: int,
        left: bool = False,
    ) -> Array:
        """Returns values of the tokens of samples, padded: int64, (batch, width).

        Args:
            values: one for each token of the table: (total,).
            indices: which samples: int64, (batch,).
            fill: stands behind a sample's last token.
            left: it stands before the first one instead.
        """
        rows = np.full((len(indices), width), fill, dtype=np.int64)
        lengths = self.lengths(indices)
        is_token = _token_mask(lengths, width, left)
        # A mask takes its values row by row, in which order `places` has them.
        rows[is_token] = values[self.places(indices)]
        return rows

    def places(self, indices: Array) -> Array:
        """Returns the places in the flat arrays of the tokens of samples, one sample after another:
        int64, (tokens,)."""
        starts = self.offsets[indices]
        lengths = self.lengths(indices)
        tokens_before = np.cumsum(lengths) - lengths
        shifts = np.repeat(starts - tokens_before, lengths)
        # The nth token of the result, moved to where its sample lies in the flat arrays.
        places: Array = np.arange(int(lengths.sum())) + shifts
        return places


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of a table, as a model takes them."""

    inputs: dict[str, torch.Tensor]
    """Arguments of the model, by name: (samples, length), or packed, (1, tokens)."""
    targets: dict[str, torch.Tensor]
    """Tensors that the loss compares the output with: `labels`, (samples, ...) or, of tokens, of
    the inputs' shape."""
    indices: Array
    """Which samples: int64, (samples,)."""
    lengths: torch.Tensor
    """Number of tokens of each: int64, (samples,)."""
    padded_tokens: int
    """Number of tokens with padding."""

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device, by one copy, without waiting for it; lengths stay here."""
        if device.type == "cpu":
            return self
        import torch

        inputs: dict[str, torch.Tensor] = {}
        targets: dict[str, torch.Tensor] = {}
        # Each tensor with the dictionary that gets its copy.
        named = [(inputs, *item) for item in self.inputs.items()]
        named += [(targets, *item) for item in self.targets.items()]
        # The widest type first: so each tensor begins at a multiple of the size of its elements.
        named.sort(key=lambda each: -each[2].itemsize)
        flat = []
        sizes = []
        for _, _, tensor in named:
            flat.append(tensor.flatten().view(torch.uint8))
            sizes.append(tensor.nbytes)
        # Pinned memory, from which the GPU copies while the CPU goes on.
        joined = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        torch.cat(flat, out=joined)
        on_device = joined.to(device, non_blocking=True)
        parts = torch.split(on_device, sizes)
        for part, (copies, name, tensor) in zip(parts, named, strict=True):
            values = part.view(tensor.dtype)
            copies[name] = values.view(tensor.shape)
        return dataclasses.replace(self, inputs=inputs, targets=targets)


def _cut(values: Array, most: int | None) -> Array:
    """Returns the first of the values of a text's tokens, and that of the last one."""
    if most is None or len(values) <= most:
        return values
    cut: Array = np.append(values[: most - 1], values[-1:])
    return cut


def _token_mask(lengths: Array, width: int, left: bool) -> Array:
    """Returns which places of padded samples hold a token: bool, (batch, width)."""
    places = np.arange(width)
    if left:
        places = places[::-1]
    mask: Array = places < lengths[:, None]
    return mask


def _flat(rows: Iterable[Any] | None, dtype: type) -> Array | None:
    if rows is None:
        return None
    arrays: list[Array] = [np.asarray(row, dtype) for row in rows]
    return np.concatenate(arrays)


def offsets_of(lengths: Sequence[int] | Array) -> Array:
    """Returns the start of every sample in a flat array, and the end of the last."""
    # In int64: int32 ends at two thousand million tokens, which corpora of texts have.
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.append(0, ends)
