"""Rows -> tokens -> batches.

Tokens of a split lie in one flat array on disk, memory-mapped by every rank. The order of the
samples belongs to the global batch: which samples make up a step does not depend on how many
ranks share it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmft.errors import UsageError
from slurmft.sources import no_column

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The samples of one split."""

    tokens: Array
    """All token ids, one sample after another: int32, (total,)."""
    offsets: Array
    """Sample i is tokens[offsets[i]:offsets[i + 1]]: int64, (samples + 1,)."""
    labels: Array
    """int64, (samples,)."""

    @classmethod
    def build(cls, samples: Sequence[Sequence[int]], labels: Sequence[int]) -> TokenTable:
        """A table from lists of token ids."""
        lengths = np.fromiter((len(s) for s in samples), dtype=np.int64, count=len(samples))
        tokens = np.fromiter(
            (t for s in samples for t in s), dtype=np.int32, count=int(lengths.sum())
        )
        return cls(tokens, offsets_of(lengths), np.asarray(labels, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("tokens", "offsets", "labels"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Memory-maps a saved table: the ranks of a node share its pages."""
        return cls(
            *(np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("tokens", "offsets", "labels"))
        )

    def batch(self, indices: Array, pad_id: int, multiple: int = 1) -> Batch:
        """The samples at `indices`, padded to the longest (rounded up to a multiple).

        Args:
            indices: int64, (batch,); at least one.
            pad_id: token id of the padding.
            multiple: the padded length is a multiple of this; tensor cores like 8.
        """
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        width = -(-int(lengths.max()) // multiple) * multiple
        mask = np.arange(width) < lengths[:, None]
        ids = np.full(mask.shape, pad_id, dtype=np.int64)
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids[mask] = self.tokens[np.repeat(starts, lengths) + within]
        inputs = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.from_numpy(self.labels[indices]),
        }
        return Batch(inputs, len(indices), int(lengths.sum()), ids.size)


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
    """Label names by label id."""
    pad_id: int

    def save(self, folder: Path) -> None:
        self.train.save(folder / "train")
        self.validation.save(folder / "validation")
        meta = {"labels": self.labels, "pad_id": self.pad_id}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenData:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train, validation = (TokenTable.load(folder / s) for s in ("train", "validation"))
        return cls(train, validation, meta["labels"], meta["pad_id"])


def offsets_of(lengths: Array) -> Array:
    """Start of every sample in a flat array, and the end of the last."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


# --- the order of samples -------------------------------------------------------------------------


def epoch_order(samples: int, seed: int, epoch: int) -> Array:
    """The order of an epoch: a permutation that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def share(step: Array, parts: int, part: int) -> Array:
    """One of `parts` consecutive shares of a step's samples; they differ by at most one sample.

    With 4 ranks and 2 micro-steps there are 8 parts. The last step of an epoch may leave some of
    them empty.
    """
    sizes = share_sizes(len(step), parts)
    start = sum(sizes[:part])
    return step[start : start + sizes[part]]


def share_sizes(samples: int, parts: int) -> list[int]:
    """Sizes of the shares that `share` gives."""
    return [samples // parts + (i < samples % parts) for i in range(parts)]


# --- local files ----------------------------------------------------------------------------------


def read_rows(path: Path) -> Any:
    """The rows of a .jsonl, .csv (.gz too) or .parquet file, as a pyarrow table.

    Raises:
        UsageError: the file is none of these inside, or has no rows.
    """
    import pyarrow as pa

    try:
        table = _read_table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    if table.num_rows == 0:
        raise UsageError(f"{str(path)!r} has no rows")
    return table


def _read_table(path: Path) -> Any:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    import pyarrow as pa

    name = path.name.removesuffix(".gz")
    with pa.input_stream(str(path), compression="detect") as stream:
        if name.endswith(".csv"):
            import pyarrow.csv

            return pyarrow.csv.read_csv(stream)
        if path.stat().st_size == 0:
            return pa.table({})
        import pyarrow.json

        return pyarrow.json.read_json(stream)


def column(table: Any, name: str, path: str) -> list[Any]:
    """A column's values.

    Raises:
        UsageError: there is no such column, or it has empty cells.
    """
    if name not in table.column_names:
        raise no_column(path, name, table.column_names)
    values: list[Any] = table.column(name).to_pylist()
    if None in values:
        raise UsageError(f"{path!r}: row {values.index(None) + 1} has no {name!r}")
    return values


def label_ids(values: Sequence[Any], names: Sequence[str], where: str) -> list[int]:
    """Labels, given as numbers or as names, as numbers.

    Raises:
        UsageError: a label beyond the known ones, with its row.
    """
    by_name = {name: i for i, name in enumerate(names)}
    ids = []
    for row, value in enumerate(values, start=1):
        label = by_name.get(value) if isinstance(value, str) else value
        if type(label) is not int or not 0 <= label < len(names):
            raise UsageError(
                f"{where!r}: row {row} has the label {value!r}",
                f"labels are 0 to {len(names) - 1}, or {', '.join(names)}",
            )
        ids.append(label)
    return ids
