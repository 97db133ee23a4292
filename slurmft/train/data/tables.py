"""Rows -> tokens -> batches.

Tokens of a split lie in one flat array on disk, memory-mapped by every rank. The order of the
samples belongs to the global batch: which samples make up a step does not depend on how many
ranks share it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slurmft.core.text import some
from slurmft.train.login.texts import Lengths

if TYPE_CHECKING:
    import torch

Array = np.ndarray
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
_ARRAYS = ("tokens", "offsets", "labels", "types", "token_labels", "label_counts")

BUCKET_STEPS = 50
"""Steps whose samples are sorted by length together."""
IGNORED = -100
"""The label of a token that nothing is to be said of, as torch's losses know it."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The samples of one split."""

    tokens: Array
    """All token ids, one sample after another: int32, (total,)."""
    offsets: Array
    """Sample i is tokens[offsets[i]:offsets[i + 1]]: int64, (samples + 1,)."""
    labels: Array
    """Of samples, as their task's loss reads them: (samples, ...); (samples, 0) where its tokens
    have labels."""
    types: Array | None = None
    """Which of two texts a token is of: int8, (total,). None: they are of one."""
    token_labels: Array | None = None
    """Of tokens: classes, or the tokens that follow; `IGNORED` where there is none: int32,
    (total,)."""
    label_counts: Array | None = None
    """How many tokens of each sample have a label: int64, (samples,). Every rank sums those of the
    whole global batch in every step."""
    extra: dict[str, Array] = field(default_factory=dict)
    """What else a task wants to know of its tokens or samples."""

    def __post_init__(self) -> None:
        if self.token_labels is not None and self.label_counts is None:
            before = np.append(0, np.cumsum(self.token_labels != IGNORED))[self.offsets]
            object.__setattr__(self, "label_counts", np.diff(before))

    @classmethod
    def build(
        cls,
        samples: Iterable[Sequence[int] | Array],
        labels: Sequence[Any] | None = None,
        types: Iterable[Sequence[int] | Array] | None = None,
        token_labels: Iterable[Sequence[int] | Array] | None = None,
        **extra: Array,
    ) -> TokenTable:
        """A table from the token ids of every sample, and its label or those of its tokens."""
        tokens = [np.asarray(sample, dtype=np.int32) for sample in samples]
        own = np.empty((len(tokens), 0)) if labels is None else np.asarray(labels)
        kinds = _flat(types, np.int8)
        if kinds is not None and not kinds.any():
            kinds = None  # what models take where they are given none
        of_tokens = _flat(token_labels, np.int32)
        offsets = offsets_of(list(map(len, tokens)))
        return cls(np.concatenate(tokens), offsets, own, kinds, of_tokens, extra=extra)

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """The samples of all, one table after the other."""
        if len(tables) == 1:
            return tables[0]
        flat: dict[str, Any] = {
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in _ARRAYS
            if name != "offsets" and getattr(tables[0], name) is not None
        }
        lengths = np.concatenate([np.diff(table.offsets) for table in tables])
        return cls(**flat, offsets=offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: Path) -> None:
        folder.mkdir()
        own = {name: getattr(self, name) for name in _ARRAYS}
        for name, array in (own | self.extra).items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Memory-maps a saved table: the ranks of a node share its pages."""
        arrays = {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
            for path in folder.glob("*.npy")
        }
        own = {name: arrays.pop(name) for name in _ARRAYS if name in arrays}
        return cls(**own, extra=arrays)

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
        spread = partial(self.padded, indices=indices, width=width)
        return self._batch(indices, spread, pad_id, attention_mask=mask)

    def packed(self, indices: Array) -> Batch:
        """The samples at `indices` one after another, sorted by length, as (1, tokens)."""
        indices = indices[np.argsort(self.lengths(indices), kind="stable")]
        places = self.places(indices)
        starts = np.repeat(self.offsets[indices], self.lengths(indices))
        return self._batch(
            indices, lambda values, fill: values[places][None], position_ids=(places - starts)[None]
        )

    def _batch(
        self, indices: Array, spread: Callable[..., Array], pad_id: int = 0, **inputs: Array
    ) -> Batch:
        """The samples at `indices`, with further inputs.

        Args:
            spread: makes what the model gets of an array of all tokens, and of what fills it up.
        """
        import torch  # the login node imports this module for tasks of the user's own

        inputs = {"input_ids": spread(self.tokens, fill=pad_id)} | inputs
        if self.types is not None:
            inputs["token_type_ids"] = spread(self.types, fill=0)
        if self.token_labels is not None:
            labels = np.asarray(spread(self.token_labels, fill=IGNORED), np.int64)
        else:
            labels = self.labels[indices]
            labels = labels.astype(np.float32) if labels.dtype.kind == "f" else labels
        return Batch(
            {name: torch.from_numpy(np.asarray(v, np.int64)) for name, v in inputs.items()},
            {"labels": torch.from_numpy(labels)},
            indices,
            torch.from_numpy(self.lengths(indices)),
            inputs["input_ids"].size,
        )

    def padded(self, values: Array, indices: Array, width: int, fill: int) -> Array:
        """Those of the values of all tokens, (total,), that are of the samples at `indices`: int64,
        (batch, width). `fill` stands behind a sample's last token."""
        rows = np.full((len(indices), width), fill, dtype=np.int64)
        rows[np.arange(width) < self.lengths(indices)[:, None]] = values[self.places(indices)]
        return rows

    def places(self, indices: Array) -> Array:
        """Where the tokens of the samples at `indices` are in the flat arrays, one sample after
        another: int64, (tokens,)."""
        starts, lengths = self.offsets[indices], self.lengths(indices)
        before = np.cumsum(lengths) - lengths
        places: Array = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
        return places


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples of a table, as a model takes them."""

    inputs: dict[str, torch.Tensor]
    """Of the model, by its names for them: (samples, length), or packed, (1, tokens)."""
    targets: dict[str, torch.Tensor]
    """What its loss compares the output with: `labels`, (samples, ...) or, of tokens, of the
    inputs' shape."""
    indices: Array
    """Which samples: int64, (samples,)."""
    lengths: torch.Tensor
    """Tokens of each: int64, (samples,)."""
    padded_tokens: int

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        """The same on a device, by one copy, without waiting for it; lengths stay here."""
        if device.type == "cpu":
            return self
        import torch

        groups: list[dict[str, torch.Tensor]] = [{}, {}]
        named = [
            (i, *item) for i, own in enumerate((self.inputs, self.targets)) for item in own.items()
        ]
        named.sort(key=lambda each: -each[2].itemsize)  # each begins where its type may
        sizes = [tensor.nbytes for *_, tensor in named]
        joined = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        torch.cat([tensor.flatten().view(torch.uint8) for *_, tensor in named], out=joined)
        parts = torch.split(joined.to(device, non_blocking=True), sizes)
        for part, (group, name, tensor) in zip(parts, named, strict=True):
            groups[group][name] = part.view(tensor.dtype).view(tensor.shape)
        return dataclasses.replace(self, inputs=groups[0], targets=groups[1])


def prepared(
    items: Iterable[_Item], make: Callable[[_Item], _Made], device: torch.device
) -> Iterator[tuple[_Item, _Made]]:
    """Items, each with what `make` makes of it. For a GPU a thread makes it, one item ahead; a CPU
    has no time to spare for that. The thread leaves the GPU alone.

    Raises:
        Exception: whatever `make` raises, when its item's turn comes.
    """
    if device.type == "cpu":
        yield from ((item, make(item)) for item in items)
        return
    with ThreadPoolExecutor(1, "batches") as thread:
        ahead: list[tuple[_Item, Future[_Made]]] = []
        for item in items:
            ahead.append((item, thread.submit(make, item)))
            if len(ahead) > 1:
                first, made = ahead.pop(0)
                yield first, made.result()
        for item, made in ahead:
            yield item, made.result()


@dataclass(frozen=True, slots=True)
class TokenData:
    """What a task prepares once, and every rank reads."""

    train: TokenTable
    validation: TokenTable
    labels: list[str]
    """Label names by label id; none where labels are numbers or spans."""
    pad_id: int
    sizes: tuple[int, ...] = ()
    """Samples of each validation split: one lies after the other."""
    texts: Any = None
    """What computing the metrics needs besides: whatever JSON can hold; None after `load`."""
    notes: tuple[str, ...] = ()
    """What a user may want to know of it, for the log."""
    warnings: tuple[str, ...] = ()
    """What a user should know, such as how many texts are cut."""
    folder: Path | None = None
    """Where it was loaded from."""
    test: TokenData | None = None
    """The test split, as its validation; None: there is none."""

    @property
    def tables(self) -> list[TokenTable]:
        """Those of all splits."""
        return [self.train, self.validation, *([self.test.validation] if self.test else [])]

    def read_texts(self) -> Any:
        """The texts: they stay on disk until then, as one rank alone wants them."""
        if self.folder is None:
            return self.texts
        return json.loads((self.folder / "texts.json").read_text(encoding="utf-8"))

    def words(self) -> list[str]:
        """ "train: 16,000 samples: joy 34 %, ...; tokens: median 20, ..."; so of every split."""
        found = []
        for name, table in zip(("train", "validation", "test"), self.tables, strict=False):
            lengths = Lengths.of(np.diff(table.offsets).tolist())
            shares = list[str]()
            if self.labels and table.labels.ndim == 1:
                counts = np.bincount(table.labels, minlength=len(self.labels))
                order = np.argsort(-counts, kind="stable")
                shares = [f"{self.labels[i]} {100 * counts[i] / len(table):.0f} %" for i in order]
            classes = f": {some(shares, 6)}" if shares else ""
            found.append(f"{name}: {len(table):,} samples{classes}; tokens: {lengths}")
        return found

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.train.save(folder / "train")
        self.validation.save(folder / "validation")
        names = ("labels", "pad_id", "sizes", "notes", "warnings")
        meta = {name: getattr(self, name) for name in names}
        for name, value in (("meta", meta), ("texts", self.texts)):
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenData:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train, validation = (TokenTable.load(folder / s) for s in ("train", "validation"))
        test = cls.load(folder / "test") if (folder / "test").is_dir() else None
        return cls(train, validation, **meta, folder=folder, test=test)


def balanced(table: TokenTable, classes: int) -> Array:
    """Weights by which each class counts as much as another one, as scikit-learn defines them:
    n / (classes that occur * samples of the class), 1 where there are none: float32, (classes,)."""
    labels = table.labels if table.token_labels is None else table.token_labels
    counts = np.bincount(labels[labels != IGNORED], minlength=classes)
    occurs = counts > 0
    found = np.ones(classes)
    found[occurs] = counts.sum() / (occurs.sum() * counts[occurs])
    return found.astype(np.float32)


def _flat(rows: Iterable[Any] | None, dtype: type) -> Array | None:
    return None if rows is None else np.concatenate([np.asarray(row, dtype) for row in rows])


def offsets_of(lengths: Sequence[int] | Array) -> Array:
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
