"""The rows of local data, checked at submission as the ranks will check them."""

import functools
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import read_json
from slurmft.core.hub import is_local
from slurmft.core.terminal import overwritten
from slurmft.core.text import some
from slurmft.train.config import TrainConfig
from slurmft.train.login.formats import RowFormat, format_of
from slurmft.train.login.rows import Labels, label_ids, read_chunks, row_words
from slurmft.train.login.sources import find_split, may_have_test
from slurmft.train.login.texts import Lengths, LocalTokenizer, Texts
from slurmft.train.recipes import facts

CHECK_S = 10.0
"""How long the check of a file may take: about a gigabyte. The ranks read the rest."""
_TELL_EVERY_S = 0.5
_MUCH_SHARED = 0.01
"""Part of a split's texts that training data has, too, of which a warning tells."""

Chunks = Iterable[tuple[float, list[list[Any]]]]
"""Some rows each: the share of a split that is read by then, and the values of each column."""


def check(train: TrainConfig, processes: int = 1) -> dict[str, dict[str, Any]]:
    """Checks the rows of local data as the ranks will, and warns of what looks like a mistake;
    `processes` is how many ranks there will be, as far as it is known. Returns local files and
    folders that the run reads: path -> its fingerprint, and in words what it has.

    Raises:
        UsageError: a file that cannot be read or lacks a column, a row without a label, a label
            that the training data does not have, a text that is none; fewer rows than processes.
    """
    inputs: dict[str, dict[str, Any]] = {}
    if train.data is not None and is_local(train.data):
        splits, told = look(train, processes)
        for split in splits:
            inputs[split.where] = _fingerprint(Path(split.where)) | {"what": split.words()}
        for text in told:
            warnings.warn(text, SlurmftWarning, stacklevel=3)
    if train.model is not None and is_local(train.model):
        inputs[train.model] = _fingerprint(Path(train.model)) | {"what": "model"}
    return inputs


def look(train: TrainConfig, processes: int = 1) -> tuple[list["Split"], list[str]]:
    """What the splits of the data have, and warnings of what looks like a mistake. A data set of
    the hub is read from its cache. Raises what `check` does."""
    assert train.data is not None
    rows, folder = format_of(train), Path(train.data) if is_local(train.data) else None

    def read(name: str) -> Split:
        if folder is None:
            return _read_split(*cached_split(train, name), rows)
        path = find_split(folder, name)
        return _read(str(path), _fingerprint(path)["sha256"], rows)

    splits = {name: read(name) for name in facts(train.task).splits}
    first, *_ = splits.values()
    classes, told = _check_labels(train.task, rows, splits.values()), list[str]()
    if folder and may_have_test(train):
        try:
            test = read("test")
            _check_labels(train.task, rows, [first, test])
            splits["test"] = test
        except UsageError as error:
            told.append(
                f"the test split is not evaluated at the end: {error.message} (slurmft predict "
                "needs no labels)"
            )
    tokenizer = LocalTokenizer.of(train.model)
    for name, split in splits.items():
        shared = 0 if split is first else len(split.texts.seen & first.texts.seen)
        split.name, split.shared = name, shared
        split.count_tokens(train, tokenizer)
    found = list(splits.values())
    return found, [*told, *_warnings(found, train, processes, classes)]


def cached_split(train: TrainConfig, name: str) -> tuple[str, Chunks]:
    """What to call a split of a data set of the hub, and its columns; from the cache alone.
    UsageError where it is not there."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries are imported
    from slurmft.train import tasks

    task: Any = tasks.get(train)
    try:
        rows = task.rows(name)
    except UsageError as error:
        raise UsageError(
            f"--data {train.data!r} is no folder, and not in the cache: {error.message}",
            f"slurmft fetch {train.model} {train.data} --task {train.task}; or give its folder",
        ) from error
    columns, count = [rows.column(column) for column in task.form.columns], len(rows)
    parts = ((start, [c[start : start + 1000] for c in columns]) for start in range(0, count, 1000))
    return rows.where, ((min(1.0, (start + 1000) / count), part) for start, part in parts)


def _fingerprint(path: Path) -> dict[str, Any]:
    try:
        return fingerprint.of(path)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename!r}: {error.strerror}") from None


@dataclass(slots=True)
class Split:
    """What was found in a split."""

    where: str
    """Its file, or what to call it in messages."""
    labels: Labels
    """None are counted where they are numbers, or spans of text."""
    texts: Texts = field(default_factory=Texts)
    rows: int = 0
    without_text: list[int] = field(default_factory=list)
    share: float = 1.0
    """How much of it was read."""
    name: str = ""
    shared: int = 0
    """Texts that the training data has, too."""
    tokens: Lengths | None = None
    """None: there is no tokenizer here."""
    cut: str = ""
    """How many texts are longer than what is kept of them, in words."""

    def count_tokens(self, train: TrainConfig, local: LocalTokenizer | None) -> None:
        """Counts the tokens of a sample of the texts, if there is a tokenizer."""
        self.tokens, self.cut = None, ""
        if local is None:
            return
        counts, longest = self.texts.token_counts(local.tokenizer, train.source_prefix or "")
        self.tokens = Lengths.of(counts)._replace(longest=longest)
        limit = min(train.max_length or local.most, local.most)
        cuts = facts(train.task).rows in ("Texts", "ManyLabels", "Words") or train.source_prefix
        long = sum(count > limit for count in counts)
        if (cuts or train.task == "seq2seq") and longest > limit:
            part = (
                f"{long:,} text{'s' * (long != 1)}"
                if len(counts) == self.rows
                else f"{long / len(counts):.1%}"
            )
            part = "few" if not long else part.replace("%", " %")
            self.cut = f"{part} cut to {limit:,} tokens"

    def words(self) -> str:
        """ "16,000 rows, 6 classes: 'joy' 5,362 (34 %), ...; tokens: median 20, ...; 31 twice" """
        count = len(self.labels.counts)
        classes = f", {count:,} classes: {self.labels.shares()}" if count else ""
        part = f" in the first {self.share:.0%} of the file" if self.share < 1 else ""
        words = f"words: {Lengths.of(self.texts.words)}"  # where there is no tokenizer
        counts = {
            "empty": len(self.without_text),
            "twice or more": self.texts.repeated,
            "also in train": self.shared,
        }
        remarks = [self.cut, *(f"{n:,} {what}" if n else "" for what, n in counts.items())]
        rows = f"{self.rows:,} rows{classes}{part}"
        lengths = f"tokens: {self.tokens}" if self.tokens else words
        return "; ".join(filter(None, (rows, lengths, ", ".join(filter(None, remarks)))))


@functools.lru_cache  # the cells of a study have the same data
def _read(path: str, version: str, rows: RowFormat) -> Split:
    return _read_split(path, read_chunks(Path(path), rows.columns), rows)


def _read_split(where: str, chunks: Chunks, rows: RowFormat) -> Split:
    """Reads and checks a split, as far as it can in time; shows its progress on a terminal."""
    found, began, told_s = Split(where, Labels(where)), time.monotonic(), 0.0
    for share, values in chunks:
        found.without_text += rows.check(values, where, found.rows + 1)
        found.labels.add(rows.labels(values, found.rows + 1))
        found.texts.add(rows.texts(values))
        found.rows += len(values[0])
        seconds = time.monotonic() - began
        if share < 1 and seconds > CHECK_S:
            found.share = share
            break
        if seconds > told_s + _TELL_EVERY_S:
            told_s = seconds
            overwritten(f"checking {os.path.basename(where)!r}: {share:.0%}")
    if told_s:
        overwritten("")
    found.labels.check_empty()
    if len(found.without_text) >= found.rows:
        raise UsageError(f"{where!r}: no row has a text", "choose with --text-column")
    return found


def _check_labels(task: str, rows: RowFormat, splits: Iterable[Split]) -> list[str]:
    """The names of the classes, if all are known; every split's labels are among them."""
    own, (train, *others) = facts(task).labels, splits
    if not rows.has_classes or (own is None and train.share < 1):
        return []
    names = list(rows.names or own or train.labels.names())
    for labels in (split.labels for split in (train, *others)):
        values = (value for _, value in labels.first)
        label_ids(values, names, labels.where, own is not None, labels.first.values())
    return names


def _warnings(
    splits: Sequence[Split], train: TrainConfig, processes: int, names: Sequence[str]
) -> Iterator[str]:
    """What looks like a mistake; UsageError where there are fewer rows than processes."""
    for split in splits:
        where = repr(split.where)
        if split.share < 1:
            yield (
                f"{where}: the first {split.share:.0%} were checked, {split.rows:,} rows, in "
                f"{CHECK_S:.0f} s; the job checks the rest"
            )
        if split.without_text:
            count = f"{len(split.without_text):,} of {split.rows:,}"
            yield f"{where}: {count} rows have an empty text: {row_words(split.without_text)}"
        yield from split.labels.oddities()
        if split.shared > _MUCH_SHARED * split.rows:
            yield (
                f"{where}: {split.shared:,} of its {split.rows:,} texts are in the training data, "
                "too: its metrics are those of texts that the model has seen"
            )
        lacks = splits[0].labels.counts.keys() - split.labels.counts.keys()
        if lacks and split.share == 1:
            lacking = some(sorted(repr(value) for _, value in lacks), 5)
            yield f"{where} has no row of classes that the training data has: {lacking}"
    first = splits[0]
    if first.share < 1 or not facts(train.task).rows_are_samples:
        return
    if first.rows < processes:
        raise UsageError(
            f"{first.where!r} has {first.rows:,} rows for {processes:,} processes",
            "fewer --nodes or --nproc-per-node; each process needs a row",
        )
    step = (train.batch_size or 1) * processes * train.gradient_accumulation_steps
    step = min(step, train.max_global_batch_size or step)
    if first.rows < step:
        yield (
            f"{first.where!r} has {first.rows:,} rows, fewer than the {step:,} of an optimizer "
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
