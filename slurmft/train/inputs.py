"""The rows of local data, checked at submission as the ranks will check them."""

import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import read_json
from slurmft.core.hub import is_local
from slurmft.core.terminal import overwritten
from slurmft.train.config import TrainConfig
from slurmft.train.formats import RowFormat, format_of
from slurmft.train.recipes import facts
from slurmft.train.rows import Labels, label_ids, read_chunks, row_words
from slurmft.train.sources import find_split

CHECK_S = 10.0
"""How long the check of a file may take: about a gigabyte. The ranks read the rest."""
_TELL_EVERY_S = 0.5


def check(train: TrainConfig, processes: int = 1) -> dict[str, dict[str, Any]]:
    """Checks the rows of local data as the ranks will, and warns of what looks like a mistake.

    Args:
        train: what to train; its folders are there.
        processes: how many ranks there will be, as far as it is known.

    Returns:
        Local files and folders that the run reads: path -> its fingerprint, and in words what it
        has.

    Raises:
        UsageError: a file that cannot be read or lacks a column, a row without a label, a label
            that the training data does not have, a text that is none; fewer rows than processes.
    """
    inputs: dict[str, dict[str, Any]] = {}
    if train.data is not None and is_local(train.data):
        rows, splits = format_of(train), []
        for path in (find_split(Path(train.data), s) for s in facts(train.task).splits):
            found = inputs[str(path)] = _fingerprint(path)
            splits.append(_read(path, found["sha256"], rows))
            found["what"] = splits[-1].words()
        names = _check_labels(train.task, rows, splits)
        for text in _warnings(splits, train, processes, names):
            warnings.warn(text, SlurmftWarning, stacklevel=3)
    if train.model is not None and is_local(train.model):
        inputs[train.model] = _fingerprint(Path(train.model)) | {"what": "model"}
    return inputs


def _fingerprint(path: Path) -> dict[str, Any]:
    try:
        return fingerprint.of(path)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename!r}: {error.strerror}") from None


@dataclass(slots=True)
class Split:
    """What was found in the file of a split."""

    path: Path
    labels: Labels
    """None are counted where they are numbers, or spans of text."""
    rows: int = 0
    without_text: list[int] = field(default_factory=list)
    share: float = 1.0
    """How much of the file was read."""

    def words(self) -> str:
        """ "16,000 rows, 6 classes: 'joy' 5,362, ..." """
        count = len(self.labels.counts)
        classes = f", {count:,} classes: {self.labels.shares()}" if count else ""
        part = f" in the first {self.share:.0%} of the file" if self.share < 1 else ""
        return f"{self.rows:,} rows{classes}{part}"


@functools.lru_cache  # the cells of a study have the same data
def _read(path: Path, version: str, rows: RowFormat) -> Split:
    """Reads and checks a split, as far as it can in time; shows its progress on a terminal."""
    where = str(path)
    found, began, told_s = Split(path, Labels(where)), time.monotonic(), 0.0
    for share, values in read_chunks(path, rows.columns):
        found.without_text += rows.check(values, where, found.rows + 1)
        found.labels.add(rows.labels(values, found.rows + 1))
        found.rows += len(values[0])
        seconds = time.monotonic() - began
        if share < 1 and seconds > CHECK_S:
            found.share = share
            break
        if seconds > told_s + _TELL_EVERY_S:
            told_s = seconds
            overwritten(f"checking {path.name!r}: {share:.0%}")
    if told_s:
        overwritten("")
    found.labels.check_empty()
    if len(found.without_text) >= found.rows:
        raise UsageError(f"{where!r}: no row has a text", "choose with --text-column")
    return found


def _check_labels(task: str, rows: RowFormat, splits: Sequence[Split]) -> list[str]:
    """The names of the classes, if all are known; every split's labels are among them."""
    own, train = facts(task).labels, splits[0]
    if not (train.labels.rows or rows.has_classes) or (own is None and train.share < 1):
        return []
    names = list(rows.names or own or train.labels.names())
    for labels in (split.labels for split in splits):
        values = (value for _, value in labels.first)
        label_ids(values, names, labels.where, own is not None, labels.first.values())
    return names


def _warnings(
    splits: Sequence[Split], train: TrainConfig, processes: int, names: Sequence[str]
) -> Iterator[str]:
    """What looks like a mistake.

    Raises:
        UsageError: there are fewer rows than processes.
    """
    for split in splits:
        where = repr(str(split.path))
        if split.share < 1:
            yield (
                f"{where}: the first {split.share:.0%} were checked, {split.rows:,} rows, in "
                f"{CHECK_S:.0f} s; the job checks the rest"
            )
        if split.without_text:
            count = f"{len(split.without_text):,} of {split.rows:,}"
            yield f"{where}: {count} rows have an empty text: {row_words(split.without_text)}"
        yield from split.labels.look_alikes()
    first = splits[0]
    if first.share < 1 or not facts(train.task).rows_are_samples:
        return
    if first.rows < processes:
        raise UsageError(
            f"{str(first.path)!r} has {first.rows:,} rows for {processes:,} processes",
            "fewer --nodes or --nproc-per-node; each process needs a row",
        )
    step = (train.batch_size or 1) * processes * train.gradient_accumulation_steps
    step = min(step, train.max_global_batch_size or step)
    if first.rows < step:
        yield (
            f"{str(first.path)!r} has {first.rows:,} rows, fewer than the {step:,} of an optimizer "
            "step: an epoch is one step (smaller --batch-size)"
        )
    if names and train.model is not None and is_local(train.model):
        yield from _head_warning(Path(train.model), names)


def _head_warning(model: Path, names: Sequence[str]) -> Iterator[str]:
    """Where a model was fine-tuned for other classes than the data has."""
    labels = (read_json(model / "config.json") or {}).get("id2label")
    known = list(labels.values()) if isinstance(labels, dict) else []
    if known == list(names) or all(str(name).startswith("LABEL_") for name in known):
        return
    head = "its head is replaced" if len(known) != len(names) else "its head is trained for them"
    yield (
        f"--model {str(model)!r} knows {len(known)} classes ({', '.join(map(repr, known[:6]))}), "
        f"the data has {len(names)} ({', '.join(map(repr, names[:6]))}): {head}"
    )
