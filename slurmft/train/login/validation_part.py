"""The validation split that --validation-fraction takes from the training data.

Which rows it has depends on the data, the fraction and the seed alone: the login node, the main
rank and every later attempt take the same ones.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from slurmft.core.errors import UsageError
from slurmft.core.text import some
from slurmft.train.config import TrainConfig
from slurmft.train.own_task import facts

VALIDATION = "validation"


def splits_of_data(train: TrainConfig) -> tuple[str, ...]:
    """Returns the names of the splits that the data of a run must have."""
    splits = facts(train.task).splits
    if train.validation_fraction is None:
        return splits
    return tuple(split for split in splits if split != VALIDATION)


def has_validation(train: TrainConfig, where: str) -> UsageError:
    """Returns the error for data that has the split which is to be taken from the training data."""
    return UsageError(
        f"--validation-fraction {train.validation_fraction}, and the data has a validation split "
        f"already: {where!r}",
        "leave --validation-fraction out, or give data without it",
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the training data that is one of the two splits."""

    fraction: float
    seed: int
    is_validation: bool

    @classmethod
    def of(cls, train: TrainConfig, split: str) -> "Part | None":
        """Returns the part that a split is; None for a split that has data of its own."""
        fraction = train.validation_fraction
        if fraction is None or split not in (facts(train.task).splits[0], VALIDATION):
            return None
        return cls(fraction, train.data_seed, split == VALIDATION)

    def rows(
        self,
        count: int,
        classes: Sequence[Hashable] | None,
        groups: Sequence[Hashable] | None,
        where: str,
    ) -> list[bool]:
        """Returns for each row of the training data whether it is of this part.

        Args:
            count: number of rows.
            classes: the class of each row; None: rows are drawn whatever they hold.
            groups: what of each row no other part may have, such as a text with several questions;
                None: nothing.
            where: name of the training data in messages.

        Raises:
            UsageError: there are too few rows, or a class has one row alone.
        """
        # Rounded up, as by scikit-learn's train_test_split.
        size = math.ceil(self.fraction * count)
        # random() is the one method whose numbers Python promises to keep.
        random = Random(self.seed)
        keys = [random.random() for _ in range(count)]
        if classes is None:
            _check_size(count, size, 1, where)
            chosen = _first_by_key(range(count), keys, size, groups)
        else:
            chosen = self._stratified(classes, keys, size, where)
        in_validation = [False] * count
        for row in chosen:
            in_validation[row] = True
        return [each == self.is_validation for each in in_validation]

    def description(self, classes: Sequence[Hashable] | None) -> str:
        """Returns in words how rows are drawn."""
        kind = "at random"
        if classes is not None:
            kind = "stratified by label"
        return f"by --validation-fraction {self.fraction}, {kind}, seed {self.seed}"

    def _stratified(
        self,
        classes: Sequence[Hashable],
        keys: Sequence[float],
        size: int,
        where: str,
    ) -> list[int]:
        rows_of_classes = defaultdict(list)
        for row, label in enumerate(classes):
            rows_of_classes[label].append(row)
        single = [rows for rows in rows_of_classes.values() if len(rows) == 1]
        if single:
            described = [f"{classes[row]!r} (row {row + 1})" for (row,) in single]
            raise UsageError(
                f"--validation-fraction {self.fraction}: {where!r} has classes of one row, which "
                f"cannot be in both splits: {some(described, 5)}",
                "add rows of them, take them out, or give a validation file",
            )
        _check_size(len(classes), size, len(rows_of_classes), where)
        counts = Counter(classes)
        # The training rows are divided up first, as by scikit-learn: the rest of each class is
        # validation.
        sizes = class_sizes(counts, len(classes) - size)
        chosen = []
        for label, rows in rows_of_classes.items():
            chosen += _first_by_key(rows, keys, counts[label] - sizes[label])
        return chosen


def _check_size(count: int, size: int, least: int, where: str) -> None:
    """Raises UsageError where one of the parts has fewer rows than it needs."""
    if min(size, count - size) >= least:
        return
    needed = "a row"
    if least > 1:
        needed = f"at least {least} rows, one for each class"
    raise UsageError(
        f"--validation-fraction makes {count - size:,} training and {size:,} validation rows of "
        f"the {count:,} of {where!r}: each needs {needed}",
        "give another fraction, or a validation file",
    )


def class_sizes(counts: Counter[Hashable], size: int) -> dict[Hashable, int]:
    """Returns how many of so many rows each class has, in proportion to its rows in the data.

    What is left after rounding down goes to the classes with the largest remainders, as in
    scikit-learn's stratified splits.
    """
    total = counts.total()
    sizes = {label: count * size // total for label, count in counts.items()}
    missing = size - sum(sizes.values())
    # In whole numbers: remainders that are equal must not differ by rounding.
    by_remainder = sorted(counts, key=lambda label: -(counts[label] * size % total))
    for label in by_remainder[:missing]:
        sizes[label] += 1
    return sizes


def _first_by_key(
    rows: Sequence[int],
    keys: Sequence[float],
    size: int,
    groups: Sequence[Hashable] | None = None,
) -> list[int]:
    """Returns so many of the rows, those with the smallest keys; of groups, whole ones alone."""
    if groups is None:
        return sorted(rows, key=keys.__getitem__)[:size]
    rows_of_groups = defaultdict(list)
    for row in rows:
        rows_of_groups[groups[row]].append(row)
    # A group comes where its first row would.
    in_order = sorted(rows_of_groups.values(), key=lambda members: keys[members[0]])
    chosen: list[int] = []
    for members in in_order[:-1]:  # the last one stays: there must be training data
        if len(chosen) >= size:
            break
        chosen += members
    return chosen
