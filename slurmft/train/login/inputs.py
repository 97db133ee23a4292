"""The look at data before a job waits in a queue: rows that ranks would refuse, likely mistakes."""

import functools
import itertools
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import read_json
from slurmft.core.hub import is_local
from slurmft.core.terminal import ProgressLine
from slurmft.core.text import counted, some
from slurmft.train import metric_spec, mix_spec
from slurmft.train.config import TrainConfig, max_steps_remark
from slurmft.train.login import prompts, sentence_modules
from slurmft.train.login.cells import (
    Labels,
    check_same_classes,
    describe_rows,
    label_ids,
    names_of_numbers,
    shares,
)
from slurmft.train.login.formats import (
    LEAST_ROWS,
    PAIR_LABELS,
    RowFormat,
    check_step,
    format_of,
    left_out,
)
from slurmft.train.login.rows import (
    Chunk,
    OptionalColumn,
    class_names,
    files_of,
    read_chunks,
    read_columns,
)
from slurmft.train.login.sentence_modules import LIBRARY
from slurmft.train.login.sources import (
    find_split,
    may_have_test,
    no_data_file,
    notes_of_names,
    suffix_of,
)
from slurmft.train.login.texts import Lengths, LocalTokenizer, Texts
from slurmft.train.login.validation_part import Part
from slurmft.train.mix_spec import MixSpec
from slurmft.train.own_task import facts

CHECK_S = 10.0
"""How long the check of a file may take: about a gigabyte. The ranks read the rest."""
_WEIGHT_COLUMNS = ("weight", "weights", "sample_weight", "sample_weights")
"""Columns by which other libraries weigh rows."""
_MUCH_SHARED = 0.01
"""Share of a split's texts that the training data has, too, from which on a warning says so."""

Chunks = Iterable[Chunk]
HubReader = Callable[[TrainConfig, str], tuple[str, Sequence[Chunk], tuple[str, ...]]]
"""Reads a split of a data set of the hub, see `cached_split.cached_split`."""


@dataclass(slots=True)
class Split:
    """Contents of a split, as far as it was read."""

    where: str
    """Its file, or its name in messages."""
    labels: Labels
    """Counts of its classes; none where labels are numbers, or spans of text."""
    texts: Texts = field(default_factory=Texts)
    rows: int = 0
    without_text: list[int] = field(default_factory=list)
    """Numbers of rows whose text is empty."""
    unread: dict[str, int] = field(default_factory=dict)
    """What of rows nothing reads, and the number of the first row that has it; see
    `RowFormat.unread`."""
    questions: list[tuple[str, str]] = field(default_factory=list)
    """The longest questions, see `RowFormat.questions`."""
    share: float = 1.0
    """Share of it that was read."""
    name: str = ""
    shared: int = 0
    """Number of its texts that the training data has, too."""
    tokens: Lengths | None = None
    """Tokens of its texts; None: there is no tokenizer here."""
    cut: str = ""
    """Remark on how many texts are longer than what is kept of them."""
    part: str = ""
    """Says which rows of its file it has; "": all."""
    scores: set[float] = field(default_factory=set)
    """Labels that are numbers, until there are two."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, where the data has them beside their numbers."""
    names_of_labels: dict[tuple[type, Any], str] = field(default_factory=dict)
    """The class of each label, by type and value: splits may number the classes differently."""

    @property
    def class_counts(self) -> Counter[Any]:
        """Number of labels of each class, by name; by the label itself where that is the name."""
        counts: Counter[Any] = Counter()
        for key, count in self.labels.counts.items():
            _, value = key
            name = self.names_of_labels.get(key, value)
            if name == str(value):
                name = value
            counts[name] += count
        return counts

    @property
    def title(self) -> str:
        """Its name in messages, as text in quotes."""
        title = repr(self.where)
        if self.part:
            title += f" ({self.name})"
        return title

    def count_tokens(self, train: TrainConfig, local: LocalTokenizer | None) -> None:
        """Counts the tokens of a sample of the texts, if there is a tokenizer."""
        self.tokens = None
        self.cut = ""
        if local is None:
            return
        prefix = train.source_prefix or sentence_modules.prompt(train)
        counts, longest = self.texts.token_counts(local.tokenizer, prefix)
        # The longest text of all may not be in the sample.
        self.tokens = Lengths.of(counts)._replace(longest=longest)
        # Ranks cut to the smaller of both, see `Pretrained.longest`.
        limit = min(train.max_length or local.most, local.most)
        if longest > limit and _cuts_texts(train):
            long_texts = sum(count > limit for count in counts)
            sampled = len(counts) // self.texts.apart
            number = self._number_of(long_texts, sampled, len(counts))
            self.cut = f"{number} cut to {limit:,} tokens"

    def check_questions(self, train: TrainConfig) -> None:
        """Raises UsageError where a question leaves no room for a window of its context."""
        if self.questions and train.model is not None:
            prompts.check_questions(train, train.model, self.questions, self.where)

    def _number_of(self, texts: int, rows: int, sampled: int) -> str:
        """Says how many of the sampled texts, of so many rows, are meant: their number if all rows
        were sampled."""
        if not texts:
            return "few"  # the longest text alone, which is in no sample
        if rows < self.rows:
            return f"{100 * texts / sampled:.1f} %"
        return counted(texts, "text")

    def summary(self) -> str:
        """Returns one line: "16,000 rows, 6 classes: 'joy' 5,362 (34 %), ...; tokens: ..."."""
        rows = counted(self.rows, "row")
        classes = len(self.class_counts)
        if classes:
            words = counted(classes, "class", "classes")
            rows += f", {words}: {shares(self.class_counts)}"
        if self.share < 1:
            rows += f" in the first {self.share:.0%} of the file"
        lengths = f"tokens: {self.tokens}"
        if self.tokens is None:  # there is no tokenizer here
            word_counts = Lengths.of(self.texts.words)
            lengths = f"words: {word_counts}"
        remarks = []
        if self.cut:
            remarks.append(self.cut)
        if self.without_text:
            remarks.append(f"{len(self.without_text):,} empty")
        if self.texts.repeated:
            remarks.append(f"{self.texts.repeated:,} twice or more")
        if self.shared:
            remarks.append(f"{self.shared:,} also in train")
        parts = [rows, lengths]
        if remarks:
            parts.append(", ".join(remarks))
        return "; ".join(parts)


def _cuts_texts(train: TrainConfig) -> bool:
    """Returns whether a text of this task is cut to --max-length, rather than divided."""
    if train.task == "seq2seq" or train.source_prefix:
        return True
    return format_of(train).cuts_texts


def check(train: TrainConfig, processes: int = 1) -> dict[str, dict[str, Any]]:
    """Checks the rows of local data as the ranks will, and warns of what looks like a mistake.

    Args:
        processes: number of ranks, as far as it is known.

    Returns:
        Path of each local file or folder that the run reads -> its fingerprint, and under "what"
        a line on its contents.

    Raises:
        UsageError: a file that cannot be read or lacks a column, a row without a label, a label
            that the training data does not have, a text that is none; fewer rows than processes.
    """
    inputs: dict[str, dict[str, Any]] = {}
    data = [source.data for source in train.sources() if source.data is not None]
    if any(map(is_local, data)):
        splits, remarks = look(train, processes)
        for split in splits:
            what = split.summary()
            if split.part:
                what = f"{split.name}, {split.part}: {what}"
            # The file has two parts: the second line goes behind the first.
            if split.where in inputs:
                inputs[split.where]["what"] += f"; {what}"
                continue
            # By it the job sees whether a file has changed since its submission.
            fingerprint_of_file = _fingerprint(Path(split.where))
            inputs[split.where] = fingerprint_of_file | {"what": what}
        for remark in remarks:
            # The level is that of who called `configure`.
            warnings.warn(remark, SlurmftWarning, stacklevel=3)
    if format_of(train).has_negatives_of_step:
        check_step(train, train.step_size(processes), LEAST_ROWS)
    if train.model is not None and facts(train.task).library == LIBRARY:
        for remark in sentence_modules.check(train):
            warnings.warn(remark, SlurmftWarning, stacklevel=3)
    if train.model is not None and is_local(train.model):
        fingerprint_of_model = _fingerprint(Path(train.model))
        inputs[train.model] = fingerprint_of_model | {"what": "model"}
    for metric in metric_spec.parsed(train.named_metrics):
        if metric.is_local:
            fingerprint_of_script = _fingerprint(Path(metric.name))
            inputs[metric.name] = fingerprint_of_script | {"what": "metric"}
    return inputs


def classes(train: TrainConfig) -> list[str]:
    """Returns the names of the classes of local data; none where labels are no classes, or the
    training data was not read to its end."""
    form = format_of(train)
    split = _read_local(train, facts(train.task).splits[0], form)
    return _check_labels(train.task, form, [split])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads splits of the sources of a run."""

    read_hub_split: HubReader | None
    """Reads data that is not local; None: nobody does."""

    def can_read(self, source: TrainConfig) -> bool:
        return is_local(str(source.data)) or self.read_hub_split is not None

    def read(self, source: TrainConfig, name: str) -> Split:
        form = format_of(source)
        if self.read_hub_split and not is_local(str(source.data)):
            where, chunks, names = self.read_hub_split(source, name)
            part = Part.of(source, name)
            split = _read_part(where, lambda: chunks, form, part)
            split.class_names = names
            return split
        # A copy: what a look adds to it must not be in the cache of `_read_file`.
        return replace(_read_local(source, name, form))


def look(
    train: TrainConfig,
    processes: int = 1,
    read_hub_split: HubReader | None = None,
) -> tuple[list[Split], list[str]]:
    """Returns the contents of the splits of the data, then of the sources of --mix, and warnings of
    what looks like a mistake.

    Args:
        read_hub_split: reads data that is not local; None: that is left out.

    Raises:
        UsageError: see `check`.
    """
    main, *sources = train.sources()
    reader = _Reader(read_hub_split)
    splits: list[Split] = []
    # Where --data is not read here, the task may still have classes of its own: sources of --mix
    # are checked against them.
    classes = list(facts(train.task).labels or ())
    remarks: list[str] = []
    if reader.can_read(main):
        splits, classes = _splits_of_data(main, reader, remarks)
    tokenizer = LocalTokenizer.of(train.model)
    for split in splits:
        split.count_tokens(main, tokenizer)
        split.check_questions(main)
    mixed: dict[int, Split] = {}
    for number, source in enumerate(sources):
        if reader.can_read(source):
            split = reader.read(source, facts(source.task).splits[0])
            split.name = f"mix {number + 1}"
            split.count_tokens(source, tokenizer)
            split.check_questions(source)
            remarks += _check_mixed(train.task, train.mixed[number], split, classes)
            mixed[number] = split
    # The training data is named first; the others are compared with it.
    training = [*splits[:1], *mixed.values()]
    for split in splits[1:]:
        split.shared = _count_shared(split, training)
    for split in (*splits, *mixed.values()):
        remarks += _warnings_of_rows(split)
    # The labels of the others are classes of the first.
    for split in training[:1]:
        remarks += split.labels.oddities()
    if is_local(str(train.data)):
        remarks += _note_unread_columns(train)
        remarks += notes_of_names(train)
    for split in splits:
        remarks += _warnings_of_split(split, splits[0])
    if splits:
        remarks += _warnings_of_run(splits[0], train, processes, classes)
    if train.mix:
        remarks += _note_shares(train, splits, mixed)
    return [*splits, *mixed.values()], remarks


def look_at_file(train: TrainConfig, path: Path) -> tuple[Split, list[str]]:
    """Returns the contents of one file, which is read as training data; and warnings of what looks
    like a mistake. Raises as `check`."""
    if suffix_of(path.name) is None:
        raise no_data_file(path)
    form = format_of(train)
    split = replace(_read_file(str(path), _fingerprint(path)["sha256"], form, None))
    split.name = facts(train.task).splits[0]
    _check_labels(train.task, form, [split])
    split.count_tokens(train, LocalTokenizer.of(train.model))
    return split, [*_warnings_of_rows(split), *split.labels.oddities()]


def _note_unread_columns(train: TrainConfig) -> Iterator[str]:
    """Yields a warning for columns of local training data that look as if they were read."""
    path = find_split(Path(str(train.data)), facts(train.task).splits[0])
    form = format_of(train)
    advice = dict(form.neighbours)
    # The rows of a language model are texts, which nobody weighs.
    if facts(train.task).rows_are_samples:
        advice |= dict.fromkeys(_WEIGHT_COLUMNS, "nothing reads: each row counts once")
    names = [OptionalColumn(name) for name in advice if name not in form.columns]
    # Without a name all columns would be read.
    if not names:
        return
    # A thousand rows are enough to see whether a column has anything.
    columns = read_columns(files_of(path)[0], names, most=1)
    for name, cells in columns.items():
        is_filled = any(cells)
        # Pairs that all go together have one label.
        if name in PAIR_LABELS:
            is_filled = len({str(cell) for cell in cells}) > 1
        if is_filled:
            yield f"{str(path)!r} has a column {name!r}, which {advice[name]}"


def _note_shares(
    train: TrainConfig,
    splits: Sequence[Split],
    mixed: Mapping[int, Split],
) -> list[str]:
    """Notes in each split of training data what part of an epoch it is; returns warnings of sources
    that are repeated.

    Args:
        splits: those of --data, as far as it was read.
        mixed: number of each source of --mix that was read -> its rows.
    """
    # --data is named first, where it was read.
    training = [next(iter(splits), None)]
    training += [mixed.get(number) for number in range(len(train.mix))]
    sizes: list[int | None] = []
    for split, source in zip(training, train.sources(), strict=True):
        size = None
        # Rows that are parts of a long text are other than the samples that are drawn.
        if split and split.share == 1 and facts(source.task).rows_are_samples:
            size = split.rows
        sizes.append(size)
    parts = mix_spec.in_words(train.mixed, sizes)
    for split, part in zip(training, parts, strict=True):
        if split is not None:
            split.part = ", ".join(filter(None, (split.part, part)))
    return mix_spec.repeated(train.mixed, sizes)


def _splits_of_data(
    train: TrainConfig,
    reader: _Reader,
    remarks: list[str],
) -> tuple[list[Split], list[str]]:
    """Returns the splits of --data, and the names of their classes; raises as `check`.

    Args:
        remarks: gets what is wrong with a test split.
    """
    form = format_of(train)
    splits = []
    for name in facts(train.task).splits:
        split = reader.read(train, name)
        split.name = name
        splits.append(split)
    classes = _check_labels(train.task, form, splits)
    if is_local(str(train.data)) and may_have_test(train):
        # A test split is optional: what is wrong with it stops no training.
        cure = ""
        try:
            test = reader.read(train, "test")
            cure = " (slurmft predict needs no labels)"
            _check_labels(train.task, form, [splits[0], test])
            test.name = "test"
            splits.append(test)
        except UsageError as error:
            remarks.append(
                f"the test split is not evaluated at the end: {error.message}{cure}"
            )
    return splits, classes


def _check_mixed(
    task: str,
    spec: MixSpec,
    split: Split,
    classes: Sequence[str],
) -> Iterator[str]:
    """Yields a warning where a source of --mix lacks classes of --data.

    Raises:
        UsageError: it has labels that are no classes of --data.
    """
    if not classes or not split.labels.counts:
        return
    numbered = split.class_names or facts(task).labels or ()
    lacking = check_same_classes(split.labels, classes, numbered, spec.text)
    names: dict[tuple[type, Any], str] = {}
    for kind, value in split.labels.first:
        if numbered and kind is int:
            names[kind, value] = numbered[value]
    split.names_of_labels = names
    if lacking and split.share == 1:
        listed = some([repr(name) for name in lacking], 5)
        yield f"--mix {spec.text!r} has no row of classes that --data has: {listed}"


def _count_shared(split: Split, training: Sequence[Split]) -> int:
    """Returns how many texts of a split are in the training data, too."""
    all_seen = [each.texts.seen for each in training]
    return sum(any(key in seen for seen in all_seen) for key in split.texts.keys)


def _fingerprint(path: Path) -> dict[str, Any]:
    try:
        return fingerprint.of(path)
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename!r}: {error.strerror}",
            "give one that you may read",
        ) from None


def _read_local(train: TrainConfig, name: str, form: RowFormat) -> Split:
    """Reads and checks a split of local data."""
    part = Part.of(train, name)
    source = name
    if part is not None:
        source = facts(train.task).splits[0]
    path = find_split(Path(str(train.data)), source)
    sha256 = _fingerprint(path)["sha256"]
    return _read_file(str(path), sha256, form, part)


@functools.lru_cache  # the cells of a study have the same data
def _read_file(
    path: str,
    sha256: str,
    form: RowFormat,
    part: Part | None,
) -> Split:
    """Reads a file; `sha256` makes the cache forget a file that has changed."""
    split = _read_part(path, lambda: read_chunks(Path(path), form.columns), form, part)
    if form.has_classes:
        names = class_names(Path(path)).get(form.columns[-1], ())
        split.class_names = tuple(names)
    return split


def _read_part(
    where: str,
    read: Callable[[], Chunks],
    form: RowFormat,
    part: Part | None,
) -> Split:
    """Reads and checks a split, which may be a part of the training data.

    Args:
        where: name of the split in messages.
        read: reads all rows.
    """
    is_of_part = None
    description = ""
    if part is not None:
        is_of_part, description = _rows_of_part(where, read(), form, part)
    split = _read_split(where, read(), form, is_of_part)
    split.part = description
    return split


def _rows_of_part(
    where: str,
    chunks: Chunks,
    form: RowFormat,
    part: Part,
) -> tuple[list[bool], str]:
    """Returns for each row of the training data whether it is of a part of it, and in words how it
    is drawn.

    It is read to its end, however long that takes: how many rows a class has is known there.
    """
    labels = Labels(where)
    rows = 0
    classes: list[Any] = []
    groups: list[Any] = []
    for chunk in chunks:
        values = chunk.columns
        _check_chunk(chunk, form, labels)
        labelled = form.labels(values, chunk.first_row)
        labels.add(labelled, partial(chunk.number, split=where))
        classes += form.classes(values) or ()
        groups += form.groups(values) or ()
        rows += len(values[0])
    labels.check_empty()
    is_of_part = part.rows(rows, classes or None, groups or None, where)
    return is_of_part, part.description(classes or None)


def _read_split(
    where: str,
    chunks: Chunks,
    form: RowFormat,
    is_of_part: Sequence[bool] | None = None,
) -> Split:
    """Reads and checks a split, as far as it can in `CHECK_S`; shows its progress on a terminal.

    Args:
        is_of_part: for each row whether it is of the split; None: all are.
    """
    split = Split(where, Labels(where), Texts(apart=form.texts_apart))
    try:
        _read_chunks(split, chunks, form, is_of_part)
    except UsageError:
        # Rows without a label are told of together, at the end: here one of them comes first.
        split.labels.check_empty()
        raise
    split.labels.check_empty()
    # Some empty texts are a warning, nothing but empty ones a wrong column.
    if len(split.without_text) >= split.rows:
        raise UsageError(f"{where!r}: no row has a text", "choose with --text-column")
    return split


def _read_chunks(
    split: Split,
    chunks: Chunks,
    form: RowFormat,
    is_of_part: Sequence[bool] | None,
) -> None:
    """Checks rows and adds them to a split; see `_read_split`."""
    where = split.where
    rows_before = 0
    began = time.monotonic()
    progress = ProgressLine()
    for chunk in chunks:
        values = chunk.columns
        count = len(values[0])
        chosen: Sequence[bool] = [True] * count
        if is_of_part is not None:
            chosen = is_of_part[rows_before : rows_before + count]
        # All rows are checked: messages have their numbers in the file.
        without_text = _check_chunk(chunk, form, split.labels)
        if not rows_before:
            # Once: it renders a template for each of the first rows.
            form.check_with_model(values, chunk.where)
        rows_before += count
        _add_rows(split, chunk, form, chosen, without_text)
        share = chunk.share
        # Part of a file is better than a submission that nobody waits for.
        elapsed_s = time.monotonic() - began
        if share < 1 and elapsed_s > CHECK_S:
            split.share = share
            break
        progress.show(f"checking {os.path.basename(where)!r}: {share:.0%}")
    progress.clear()


def _check_chunk(chunk: Chunk, form: RowFormat, labels: Labels) -> list[int]:
    """Checks rows, and returns the numbers of those without a text.

    Args:
        labels: gets the labels of the rows before one that is wrong.

    Raises:
        UsageError: of the first row that cannot be right.
    """
    values = chunk.columns
    try:
        return form.check(values, chunk.where, chunk.first_row)
    except UsageError:
        # A column was checked after the other: another row may come first.
        for place in range(len(values[0])):
            row = chunk.first_row + place
            cells = [column[place : place + 1] for column in values]
            form.check(cells, chunk.where, row)
            labelled = form.labels(cells, row)
            labels.add(labelled, partial(chunk.number, split=labels.where))
        raise


def _add_rows(
    split: Split,
    chunk: Chunk,
    form: RowFormat,
    chosen: Sequence[bool],
    without_text: Sequence[int],
) -> None:
    """Adds what rows of a file hold to a split.

    Args:
        chosen: for each row whether it is of the split.
        without_text: numbers of the rows whose text is empty.
    """
    values = chunk.columns
    start = chunk.first_row
    where = split.where
    for row in without_text:
        if chosen[row - start]:
            split.without_text.append(chunk.number(row, where))
    for row, what in form.unread(values, start):
        split.unread.setdefault(what, chunk.number(row, where))
    labelled = form.labels(values, start)
    if not all(chosen):
        labelled = (pair for pair in labelled if chosen[pair[0] - start])
    split.labels.add(labelled, partial(chunk.number, split=where))
    split.texts.add(itertools.compress(form.texts(values), chosen))
    questions = itertools.chain(split.questions, form.questions(values))
    split.questions = prompts.longest_questions(questions)
    # Two tell that scores differ: a set of all might be as large as the data.
    if len(split.scores) < 2:
        split.scores.update(itertools.compress(form.scores(values), chosen))
    split.rows += sum(chosen)


def _check_labels(task: str, form: RowFormat, splits: Sequence[Split]) -> list[str]:
    """Checks that the labels of every split are classes of the first; returns their names.

    None are returned where labels are no classes, or the training data was not read to its end.
    """
    task_labels = facts(task).labels
    train = splits[0]
    # Part of a file may lack a class: then labels can only be checked against the task's own.
    known_names = form.names or task_labels or train.class_names
    if not form.has_classes or (not known_names and train.share < 1):
        return []
    names = list(known_names or train.labels.names(train.part))
    for split in splits:
        may_be_number = task_labels is not None or bool(split.class_names)
        # Each label once, with the row in which it is first. It raises for one that is no class.
        labels = split.labels
        values = [value for _, value in labels.first]
        numbered = names_of_numbers(split.class_names, names)
        rows = labels.first.values()
        ids = label_ids(values, names, labels.where, may_be_number, rows, numbered)
        split.names_of_labels = dict(
            zip(labels.first, (names[number] for number in ids), strict=True)
        )
    return names


def _warnings_of_rows(split: Split) -> Iterator[str]:
    """Yields what looks like a mistake in the rows of one split."""
    where = split.title
    if split.share < 1:
        yield (
            f"{where}: the first {split.share:.0%} were checked, {split.rows:,} rows, in "
            f"{CHECK_S:.0f} s; the job checks the rest"
        )
    if split.without_text:
        count = len(split.without_text)
        rows = describe_rows(split.without_text)
        yield f"{where}: {count:,} of {split.rows:,} rows have an empty text: {rows}"
    for what, row in split.unread.items():
        yield f"{where}: nothing reads {what}: row {row} is the first that has it"


def _warnings_of_split(split: Split, train: Split) -> Iterator[str]:
    """Yields what looks like a mistake of a split beside the training data, which is `train`."""
    where = split.title
    if split.shared > _MUCH_SHARED * split.rows:
        yield (
            f"{where}: {split.shared:,} of its {split.rows:,} texts are in the training data, "
            "too: its metrics are those of texts that the model has seen; take them out of one "
            "of the two"
        )
    if len(split.scores) == 1 and split.share == 1:
        (score,) = split.scores
        yield (
            f"{where} has one score only, {score:g}: of it no correlation and no ranking can be "
            "computed, which tell models apart"
        )
    # Its metrics say nothing of a class that it lacks; a rest that was not read may have one.
    names_in_split = {str(name) for name in split.class_counts}
    missing = [name for name in train.class_counts if str(name) not in names_in_split]
    if missing and split.share == 1:
        listed = some(sorted(repr(name) for name in missing), 5)
        yield f"{where} has no row of classes that the training data has: {listed}"


def _warnings_of_run(
    first: Split,
    train: TrainConfig,
    processes: int,
    classes: Sequence[str],
) -> Iterator[str]:
    """Yields what the number of rows and the model make look like a mistake.

    Raises:
        UsageError: an epoch has fewer rows than processes.
    """
    if first.share < 1 or not facts(train.task).rows_are_samples:
        return
    rows = first.rows + sum(mix_spec.draws(first.rows, train.mixed))
    what = first.title
    if train.mix:
        what = "an epoch"
    if rows < processes:
        raise UsageError(
            f"{what} has {rows:,} rows for {processes:,} processes",
            "fewer --nodes or --nproc-per-node; each process needs a row",
        )
    step_samples = train.step_size(processes)
    if rows < step_samples:
        size = "--batch-size"
        if train.global_batch_size is not None:
            size = "--global-batch-size"
        yield (
            f"{what} has {rows:,} rows, fewer than the {step_samples:,} of an "
            f"optimizer step: an epoch is one step (smaller {size})"
        )
    if format_of(train).has_negatives_of_step:
        check_step(train, min(rows, step_samples), LEAST_ROWS)
        if 0 < rows % step_samples < LEAST_ROWS:
            yield f"{what} has {rows:,} rows: {left_out(rows % step_samples)}"
    # More processes than are known here make fewer steps.
    steps = (train.epochs or 0) * math.ceil(rows / step_samples)
    if train.epochs and (remark := max_steps_remark(train, steps)):
        yield remark
    if classes and train.model is not None and is_local(train.model):
        yield from _head_warning(Path(train.model), classes)


def _head_warning(model: Path, classes: Sequence[str]) -> Iterator[str]:
    """Warns where a model was fine-tuned for other classes than the data has."""
    config = read_json(model / "config.json") or {}
    id2label = config.get("id2label")
    trained: list[Any] = []
    if isinstance(id2label, dict):
        trained = list(id2label.values())
    # LABEL_0 and so on: transformers' names where nobody gave any, as in a model that was only
    # pretrained.
    is_unnamed = all(str(name).startswith("LABEL_") for name in trained)
    if is_unnamed or trained == list(classes):
        return
    if len(trained) == len(classes):
        consequence = "its head is trained for them"
    else:
        consequence = "its head is replaced"
    in_model = f"{len(trained)} classes ({_first_few(trained)})"
    in_data = f"{len(classes)} ({_first_few(classes)})"
    yield f"--model {str(model)!r} knows {in_model}, the data has {in_data}: {consequence}"


def _first_few(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names[:6]))
