"""Shows the data of a run before anything runs. It shows texts, classes, lengths, and what looks
wrong. The data is read as the run will read it.

examples:
  slurmft data /gpfs/tickets                              train.csv and validation.csv
  slurmft data tickets.csv                                one file, before it is divided
  slurmft data /gpfs/tickets --text-column body --label-column team --model /gpfs/distilbert
  slurmft data /gpfs/chats --task sft
  slurmft data dair-ai/emotion --task emotion             of the hub's cache; see slurmft fetch
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, input_path, print_json, typed_options
from slurmft.core.errors import Exit, UsageError
from slurmft.core.filesystem import absolute
from slurmft.core.options import flag, options
from slurmft.core.text import aligned, shown
from slurmft.train import own_task
from slurmft.train.cached_split import cached_split
from slurmft.train.config import TrainConfig
from slurmft.train.login.inputs import Split, look, look_at_file
from slurmft.train.login.sources import localize
from slurmft.train.login.texts import SAMPLE, Lengths

ELSEWHERE = Elsewhere.PLAIN

_FLAGS = [
    name
    for name, each in options(TrainConfig).items()
    # The declaration of an option says which commands besides `submit` have it.
    if "data" in each.commands
]
_CLASSES_SHOWN = 20
"""Most classes that are all shown; of more, the largest and the smallest are."""
_LARGEST = 10
_SMALLEST = 5


LengthFacts: TypeAlias = Annotated[dict[str, Any], Lengths]


class SplitFacts(TypedDict):
    """The contents of a split."""

    where: str
    """Its file, or its name in messages."""
    texts: int
    share_read: float
    """The share of the file that was read."""
    part: str | None
    """How it was split off the training data, in words."""
    empty: int
    """How many rows have no text."""
    repeated: int
    """How many texts are there twice or more."""
    also_in_train: int
    """How many of its texts the training data has, too."""
    cut: str | None
    """How texts are cut to the model's length, in words."""
    classes: dict[str, int]
    """Class -> how many texts have it."""
    words: LengthFacts
    characters: LengthFacts
    tokens: NotRequired[LengthFacts]
    """With the model's tokenizer."""


class DataFacts(TypedDict):
    """The contents of data, and what looks wrong."""

    splits: dict[str, SplitFacts]
    """Name -> split."""
    warnings: list[str]


def parser() -> Parser:
    command = Parser("slurmft data", __doc__)
    text = (
        "folder with train and validation, one file, or hub id (default: the recipe's)"
    )
    command.add_argument(
        "data",
        type=input_path,
        metavar="DIR|FILE|ID",
        nargs="?",
        help=text,
    )
    command.add_json("the same, as JSON", DataFacts)
    title = "how to read it, as slurmft submit does"
    return command.add_options(TrainConfig, title, _FLAGS)


def facts(splits: list[Split], warnings: list[str]) -> DataFacts:
    """Returns the contents of splits, as JSON can hold them."""
    facts_of_splits = {split.name: _facts_of_split(split) for split in splits}
    return DataFacts(splits=facts_of_splits, warnings=warnings)


def _facts_of_split(split: Split) -> SplitFacts:
    classes: dict[str, int] = {}
    for value, count in split.class_counts.most_common():
        # JSON has texts alone as keys; the data may have numbers as labels.
        classes[str(value)] = count
    split_facts = SplitFacts(
        where=split.where,
        texts=split.rows,
        share_read=split.share,
        part=split.part or None,
        empty=len(split.without_text),
        repeated=split.texts.repeated,
        also_in_train=split.shared,
        cut=split.cut or None,
        classes=classes,
        words=Lengths.of(split.texts.words)._asdict(),
        characters=Lengths.of(split.texts.characters)._asdict(),
    )
    if split.tokens:
        split_facts["tokens"] = split.tokens._asdict()
    return split_facts


def text(splits: list[Split], class_names: tuple[str, ...] = ()) -> str:
    """Returns the contents of splits as lines of less than 60 columns.

    Args:
        class_names: names of the classes that data may give by their numbers.
    """
    columns = [["", "texts", "empty", "twice or more", "also in train"]]
    for split in splits:
        counts = (
            split.rows,
            len(split.without_text),
            split.texts.repeated,
            split.shared,
        )
        columns.append([split.name, *(f"{count:,}" for count in counts)])
    columns[1][-1] = ""  # the first split is the training data itself
    # Turned: a line for each count, a column for each split.
    rows = [list(row) for row in zip(*columns, strict=True)]
    lines = aligned(rows)
    lines += _classes(splits, class_names)
    lines += _lengths(splits)
    for split in splits:
        if split.share < 1:
            share = f"the first {split.share:.0%} of the file, no more"
            lines.append(f"{split.name}: {share}")
    return "\n".join(lines)


def _classes(splits: list[Split], class_names: tuple[str, ...]) -> list[str]:
    """Returns a row for each class: how many texts of each split have it."""
    # The order is that of the training data in every column, so that rows compare.
    most_common = splits[0].labels.counts.most_common()
    order = [label for label, _ in most_common]
    if not order:
        return []
    is_cut = len(order) > _CLASSES_SHOWN
    listed = order
    if is_cut:
        listed = order[:_LARGEST] + order[-_SMALLEST:]
    names = [split.name for split in splits]
    rows = [["class", *names]]
    counts = [_counts_by_name(split, class_names) for split in splits]
    for _, value in listed:
        text = str(value)
        name = _class_name(value, class_names)
        # A label that is a number is shown with the name that the task has for it.
        if name != text:
            text += f" {name}"
        cells = [_share(counts_of_split, name) for counts_of_split in counts]
        rows.append([shown(text, 20), *cells])
    head, *lines = aligned(rows)
    if is_cut:
        left_out = len(order) - len(listed)
        lines.insert(_LARGEST, f"... {left_out:,} more; then the smallest:")
    return ["", head, *lines]


def _class_name(value: Any, class_names: Sequence[str]) -> str:
    """Returns the name of a class, of which the data may have the number."""
    text = str(value)
    if text.isdecimal() and int(text) < len(class_names):
        return class_names[int(text)]
    return text


def _counts_by_name(split: Split, class_names: Sequence[str]) -> Counter[str]:
    """Returns how many texts of a split have each class: splits may number them differently."""
    counts: Counter[str] = Counter()
    for (_, value), count in split.labels.counts.items():
        counts[_class_name(value, split.class_names or class_names)] += count
    return counts


def _share(counts: Counter[str], name: str) -> str:
    """Returns how many texts of a split are of a class, and their share of it."""
    count = counts[name]
    # Rows with any number of labels may all have none: then there is nothing to divide by.
    percent = 100 * count / (counts.total() or 1)
    return f"{count:,} ({percent:.1f} %)"


def _lengths(splits: list[Split]) -> list[str]:
    """Returns rows of the lengths of texts, in tokens where there is a tokenizer."""
    # All splits have tokens, or none: the tokenizer is the model's.
    kinds = ["tokens"]
    if splits[0].tokens is None:
        kinds = ["words", "characters"]
    rows = [["length in", "median", "95 % up to", "longest"]]
    for split in splits:
        for kind in kinds:
            lengths = split.tokens or Lengths.of(getattr(split.texts, kind))
            cells = [f"{value:,}" for value in lengths]
            rows.append([f"{kind}, {split.name}", *cells])
    lines = ["", *aligned(rows)]
    if splits[0].tokens is None:
        lines.append("no tokenizer here: --model DIR gives tokens")
    elif any(split.rows > SAMPLE for split in splits):
        lines.append(f"of {SAMPLE:,} texts of a split; the longest of all")
    for split in splits:
        if split.cut:
            lines.append(f"{split.name}: {split.cut}")
    return lines


def _check_is_of_files(train: TrainConfig) -> None:
    """Raises UsageError for options of whole data sets, where one file is looked at."""
    declared = options(TrainConfig)
    for name in _FLAGS:
        # What concerns training alone, of the options of this command, is about splits.
        if declared[name].predicts != "reset":
            continue
        if declared[name].is_set(getattr(train, name)):
            raise UsageError(
                f"{flag(name)} is for a data set, and {train.data!r} is one file",
                f"give the folder of its splits, or leave {flag(name)} out",
            )


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    from slurmft.train.login.configure import resolve  # --help need not wait for it

    # --data is no flag of this command: the data is its argument.
    flags = typed_options(arguments, options(TrainConfig).keys() - {"data"})
    if arguments.data:
        flags["data"] = arguments.data
    if "task" not in flags and "recipe" not in flags:
        # Not the default of `submit`, which generates its data: there is nothing to look at.
        flags["task"] = "text-classification"
    train, _ = resolve(flags)
    if train.data is None:
        reason = "makes its data itself: there are no files to look at"
        if own_task.facts(train.task).splits:
            reason = "has no data of its own to look at"
        raise UsageError(f"--task {train.task} {reason}", "slurmft data DIR")
    file = absolute(train.data or "")
    if file.is_file():
        _check_is_of_files(train)
        split, warnings = look_at_file(train, file)
        splits = [split]
    else:
        train = localize(train)
        splits, warnings = look(train, read_hub_split=cached_split)
    if arguments.json:
        return print_json(facts(splits, warnings))
    class_names = own_task.facts(train.task).labels or splits[0].class_names
    print(f"{train.data}, read as --task {train.task}\n")
    print(text(splits, class_names))
    for split in splits:
        if split.part:
            print(f"{split.name}: {split.where}: {split.part}")
    for each in warnings:
        print(f"warning: {each}")
    return Exit.OK
