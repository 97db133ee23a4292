"""All that a task prepares once and every rank reads: the tables of its splits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.core.text import counted, some
from slurmft.train.data.tables import IGNORED, Array, TokenTable
from slurmft.train.login.texts import Lengths

_META = (
    "labels",
    "label_type",
    "pad_id",
    "sizes",
    "source_sizes",
    "row_size",
    "max_length",
    "notes",
    "warnings",
)
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class TokenData:
    """Tables of the splits, and facts of them."""

    train: TokenTable
    validation: TokenTable
    labels: list[str]
    """Label names by label id; none where labels are numbers or spans."""
    pad_id: int
    sizes: tuple[int, ...] = ()
    """Number of samples of each validation split: one lies after the other."""
    source_sizes: tuple[int, ...] = ()
    """Number of training samples of --data, and of each source of --mix: they lie one after the
    other. None where there is no other source."""
    row_size: int = 1
    """Neighbouring samples that are a row of the data, and train together: the texts of a pair."""
    max_length: int | None = None
    """Tokens that texts are cut to; None: only the task knows."""
    texts: Any = None
    """Further facts that the metrics need, as JSON can hold them; None after `load`."""
    notes: tuple[str, ...] = ()
    """Remarks for the log."""
    warnings: tuple[str, ...] = ()
    """Remarks that a user should see, such as how many texts are cut."""
    folder: Path | None = None
    """Folder that it was loaded from."""
    label_type: str = "str"
    """Type of the labels in the training data, of which `labels` has the names."""
    test: TokenData | None = None
    """The test split, as its validation; None: there is none."""

    @property
    def label_values(self) -> list[Any]:
        """Labels by label id, as the training data has them: names, whole numbers or truth
        values."""
        if self.label_type == "bool":
            return [name == "True" for name in self.labels]
        # Whoever has the model may have given its classes other names.
        if self.label_type == "int" and all(map(_NUMBER.fullmatch, self.labels)):
            return list(map(int, self.labels))
        return self.labels

    @property
    def source_rows(self) -> list[int]:
        """Number of rows of each source of the training data."""
        sizes = self.source_sizes or (len(self.train),)
        return [size // self.row_size for size in sizes]

    @property
    def tables(self) -> list[TokenTable]:
        """Tables of all splits."""
        tables = [self.train, self.validation]
        if self.test:
            tables.append(self.test.validation)
        return tables

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of all splits."""
        return max(table.longest for table in self.tables)

    def rows(self, table: TokenTable) -> int:
        """Returns the number of rows of a split."""
        return len(table) // self.row_size

    def row_lengths(self, table: TokenTable) -> Array:
        """Returns the number of tokens of each row of a split: int64, (rows,)."""
        # A row ends where the next one begins: at every so-many-th offset.
        lengths: Array = np.diff(table.offsets[:: self.row_size])
        return lengths

    def samples_of(self, rows: Array) -> Array:
        """Returns the samples of rows, those of one row after those of another: int64, (rows *
        row_size,)."""
        samples = rows[:, None] * self.row_size + np.arange(self.row_size)
        return samples.reshape(-1)

    def read_texts(self) -> Any:
        """Returns `texts`, which stay on disk until then: one rank alone wants them."""
        if self.folder is None:
            return self.texts
        text = (self.folder / "texts.json").read_text(encoding="utf-8")
        return json.loads(text)

    def words(self) -> list[str]:
        """Returns a line for each split: "train: 16,000 samples: joy 34 %, ...; tokens: ..."."""
        lines = []
        names = ("train", "validation", "test")
        # Not strict: there need not be a test split.
        for name, table in zip(names, self.tables, strict=False):
            token_counts = np.diff(table.offsets)
            lengths = Lengths.of(token_counts.tolist())
            line = f"{name}: {counted(self.rows(table), 'sample')}"
            if self.source_sizes and table is self.train:
                line += " of all sources"
            if self.labels and table.labels.ndim == 1:  # each sample has one class
                line += f": {self._shares(table)}"
            lines.append(f"{line}; tokens: {lengths}")
        return lines

    def _shares(self, table: TokenTable) -> str:
        """Returns the share of each class, the largest first: "joy 34 %, anger 13 %"."""
        counts = np.bincount(table.labels, minlength=len(self.labels))
        # Stable: classes with as many samples stay in their order.
        order = np.argsort(-counts, kind="stable")
        shares = []
        for i in order:
            percent = 100 * counts[i] / len(table)
            shares.append(f"{self.labels[i]} {percent:.0f} %")
        return some(shares, 6)

    def save(self, folder: Path) -> None:
        """Writes tables and facts, but not the test split."""
        folder.mkdir(exist_ok=True)
        self.train.save(folder / "train")
        self.validation.save(folder / "validation")
        meta = {name: getattr(self, name) for name in _META}
        # The texts have a file of their own, which one rank alone reads.
        for name, content in (("meta", meta), ("texts", self.texts)):
            text = json.dumps(content)
            (folder / f"{name}.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenData:
        """Memory-maps what `save` wrote, and a test split in the folder `test`."""
        text = (folder / "meta.json").read_text(encoding="utf-8")
        meta = json.loads(text)
        test_folder = folder / "test"
        test = None
        if test_folder.is_dir():
            test = cls.load(test_folder)
        return cls(
            train=TokenTable.load(folder / "train"),
            validation=TokenTable.load(folder / "validation"),
            **meta,
            folder=folder,
            test=test,
        )


def balanced(table: TokenTable, classes: int, weights: Array | None = None) -> Array:
    """Returns weights by which each class counts as much as another one: float32, (classes,).

    As scikit-learn defines them: n / (classes that occur * samples of the class); 1 for a class
    that does not occur.

    Args:
        weights: how often each sample counts: (samples,); None: once.
    """
    # Classes are of samples or of tokens, never of both.
    labels = table.labels
    if table.token_labels is not None:
        labels = table.token_labels
        if weights is not None:
            weights = np.repeat(weights, np.diff(table.offsets))
    is_counted = labels != IGNORED
    if weights is not None:
        weights = weights[is_counted]
    counts = np.bincount(labels[is_counted], weights, minlength=classes)
    occurs = counts > 0
    weights = np.ones(classes)
    weights[occurs] = counts.sum() / (occurs.sum() * counts[occurs])
    return weights.astype(np.float32)
