"""Formats of rows: the columns that a task reads, and what of their values cannot be right.

The login node and the ranks check rows by this code: what a rank would refuse after hours in a
queue is refused at submission. It needs neither torch nor numpy.
"""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slurmft.core.errors import UsageError
from slurmft.core.text import shown
from slurmft.train.config import TrainConfig
from slurmft.train.login.cells import (
    any_empty,
    check_texts,
    is_empty,
    label_numbers,
    wrong_label,
)
from slurmft.train.login.chats import (
    SYSTEM_ROLES,
    Conversation,
    FormError,
    check_contents,
    has_form,
    is_learnt,
    local_template,
    local_template_text,
    messages_of,
    prompt_messages,
    text_of,
    tools_of,
    unread_keys,
    with_system,
    written,
)
from slurmft.train.login.rows import SQUAD_COLUMNS, OptionalColumn
from slurmft.train.own_task import facts

LEAST_ROWS = 2
"""Rows of the smallest optimizer step that teaches something, where the rows of a step are the
negatives of each other: alone a row has a loss of 0."""
Text = str | tuple[str, ...]
"""A text, or a pair of them."""
Columns = Sequence[Sequence[Any]]
"""Values of some rows, by column."""
PAIR_LABELS = ("label", "labels", "score", "similarity_score")
"""Columns that say how well two texts go together."""


# Frozen, and so a key of the cache in which `inputs` keeps what it has read.
@dataclass(frozen=True)
class RowFormat(ABC):
    """Columns of a task, and the checks of their values; one for each configuration."""

    columns: tuple[str, ...]
    """Their names, in the order in which the checks get them."""
    has_classes: bool = False
    """There must be labels, and they are classes."""
    names: tuple[str, ...] = ()
    """Names of the classes, where each has a column of its name."""

    cuts_texts: ClassVar[bool] = False
    """What is longer than --max-length is cut, and not divided."""

    @property
    def texts_apart(self) -> int:
        """Texts of a row that a model reads one by one; 1: one text, or a pair together."""
        return 1

    @property
    def has_negatives_of_step(self) -> bool:
        """Whether a row has no other negatives than the texts of the other rows of its step."""
        return False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be alike in rows that train together: texts that are read one by one, and
        whether there are classes."""
        return self.texts_apart, self.has_classes

    @property
    def neighbours(self) -> Mapping[str, str]:
        """Columns that other programs read of such rows, and which are not read here: what is said
        of each behind "a column which"."""
        return {}

    @classmethod
    def of(cls, train: TrainConfig) -> "RowFormat":
        """Returns the format for a configuration; here its columns of texts and of labels."""
        return cls(_given(train.text_column, train.label_column))

    @abstractmethod
    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        """Checks rows, and returns the numbers of those without a text.

        Args:
            where: name of the split in messages.
            start: number of the first row.

        Raises:
            UsageError: a value that cannot be right.
        """

    def check_with_model(self, values: Columns, where: str) -> None:
        """Checks the first rows of a split with what the login node has of the model; raises
        UsageError. Here, nothing."""
        return

    def unread(self, values: Columns, start: int = 1) -> Iterator[tuple[int, str]]:
        """Yields what rows have beside the values that are read, and may be meant to be learnt: the
        number of the row, and what it is. Here, nothing is known of."""
        yield from ()

    def inputs(self) -> tuple[str, ...]:
        """Returns the names of the columns that a model reads, those without labels: a file for
        `slurmft predict` has them."""
        return self.columns[:1]

    def check_inputs(self, values: Columns, where: str) -> list[int]:
        """Checks the columns of `inputs`, and returns the numbers of rows that lack a text; raises
        as `check`."""
        return _check_columns_of_texts(self.inputs(), values, where, start=1)

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        """Yields the labels that are classes, each with the number of its row."""
        yield from ()

    def classes(self, values: Columns) -> Sequence[Any] | None:
        """Returns the class of each row; None where rows have none, or several."""
        return None

    def scores(self, values: Columns) -> Sequence[float]:
        """Returns the label of each row, where it is a number; here, none."""
        return ()

    def groups(self, values: Columns) -> Sequence[Any] | None:
        """Returns what of each row other rows may have, too, and only one split may have; here,
        nothing."""
        return None

    def questions(self, values: Columns) -> Iterable[tuple[str, str]]:
        """Returns what of rows is never cut, a question: what messages call it, and its text. Here,
        nothing."""
        return ()

    def texts(self, values: Columns) -> Iterable[Text]:
        """Returns what a model reads of each row: to look at lengths, and for duplicates."""
        return values[0]


def format_of(train: TrainConfig) -> RowFormat:
    """Returns the format of the rows that a configuration's task reads."""
    rows = facts(train.task).rows
    # A name in tasks.toml, a class in a task of the user's own.
    if isinstance(rows, str):
        rows = globals()[rows]
    form: RowFormat = rows.of(train)
    return form


def check_step(train: TrainConfig, rows: int, least: int) -> None:
    """Raises UsageError where an optimizer step has fewer rows than teach something."""
    if rows < least:
        raise UsageError(
            f"an optimizer step has {rows:,} row(s), of which --task {train.task} learns nothing: "
            f"its loss compares {least} rows or more",
            "give a larger --batch-size, or more processes by --nproc-per-node",
        )


def left_out(rows: int) -> str:
    """Says of how many rows at the end of each epoch no step is made."""
    return (
        f"the last {rows:,} of each epoch, others each time, are too few for an optimizer step, "
        "and are left out"
    )


def _given(*columns: str | None) -> tuple[str, ...]:
    return tuple(column for column in columns if column)


# --- texts and classes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts(RowFormat):
    """A text, or two, and a label: a class, or a number."""

    has_classes: bool = True

    cuts_texts = True

    @classmethod
    def of(cls, train: TrainConfig) -> "Texts":
        columns = _given(train.text_column, train.text_pair_column, train.label_column)
        return cls(columns, has_classes=facts(train.task).labels != ())

    def inputs(self) -> tuple[str, ...]:
        # Labels come last: a column of them, or one for each name.
        label_columns = len(self.names) or 1
        return self.columns[:-label_columns]

    def parts(self, values: Columns) -> tuple[Columns, Columns]:
        """Returns the columns of texts, and those of labels."""
        text_columns = len(self.inputs())
        return values[:text_columns], values[text_columns:]

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        # The subclass with several columns of labels has a check of its own.
        texts, (labels,) = self.parts(values)
        empty = _check_columns_of_texts(self.columns, texts, where, start)
        if not self.has_classes:
            label_numbers(labels, where, start)  # raises for what is no number
        return empty

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        if self.has_classes:
            yield from enumerate(values[-1], start)

    def classes(self, values: Columns) -> Sequence[Any] | None:
        return values[-1] if self.has_classes else None

    def scores(self, values: Columns) -> Sequence[float]:
        if self.has_classes:
            return ()
        return label_numbers(values[-1], "labels")

    def texts(self, values: Columns) -> Iterable[Text]:
        texts, _ = self.parts(values)
        if len(texts) == 1:
            return texts[0]
        return zip(*texts, strict=True)


def _check_columns_of_texts(
    names: Sequence[str], columns: Columns, where: str, start: int
) -> list[int]:
    """Returns the rows without a text in one of the columns, whose names come first in `names`."""
    empty = set()
    for name, texts in zip(names, columns, strict=False):
        empty.update(check_texts(name, texts, where, start))
    # A row with two empty texts counts once.
    return sorted(empty)


@dataclass(frozen=True)
class ManyLabels(Texts):
    """A text, or two, and any number of classes: a list of them, or a column of 0 and 1 of each."""

    @classmethod
    def of(cls, train: TrainConfig) -> "ManyLabels":
        texts = _given(train.text_column, train.text_pair_column)
        # --label-column joy,love,fear: a column of 0 and 1 of each class.
        columns = (train.label_column or "").split(",")
        labels = tuple(column.strip() for column in columns)
        names: tuple[str, ...] = ()
        if len(labels) > 1:  # a single column holds lists of names
            names = labels
        return cls((*texts, *labels), names=names)

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        texts, labels = self.parts(values)
        if self.names:
            self._check_flags(labels, where, start)
        else:
            self._check_lists(labels[0], where, start)
        return _check_columns_of_texts(self.columns, texts, where, start)

    def _check_flags(self, columns: Columns, where: str, start: int) -> None:
        for name, cells in zip(self.names, columns, strict=False):
            for row, cell in enumerate(cells, start):
                if cell not in (0, 1, "0", "1"):  # a .csv has them as texts
                    raise UsageError(
                        f"{where!r}: row {row} has {cell!r} in the column {name!r}",
                        "each of several columns of labels holds 0 or 1",
                    )

    def _check_lists(self, cells: Sequence[Any], where: str, start: int) -> None:
        for row, labels in enumerate(cells, start):
            if not isinstance(labels, list | tuple):
                raise UsageError(
                    f"{where!r}: row {row} has the labels {labels!r}, which are no list",
                    'a row is {"text": "...", "labels": ["joy", "love"]}, or it has a column of 0 '
                    "and 1 of each class: --label-column joy,love,fear",
                )
            if any_empty(labels):
                raise wrong_label(
                    where,
                    row,
                    None,
                    "a text without classes has the labels []",
                )
            if _are_flags(labels):
                raise UsageError(
                    f"{where!r}: row {row} has the labels {shown(repr(labels))}, a 0 or 1 of each "
                    "class",
                    "a list holds the names of the classes that a text has; 0 and 1 have a column "
                    "of each class: --label-column joy,love,fear",
                )

    def classes(self, values: Columns) -> Sequence[Any] | None:
        return None

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        _, columns = self.parts(values)
        for row, cells in enumerate(zip(*columns, strict=True), start):
            if not self.names:
                yield from ((row, label) for label in _each_once(cells[0]))
                continue
            for name, cell in zip(self.names, cells, strict=False):
                # The cells of a .csv are texts, and the text "0" is true.
                if int(cell):
                    yield row, name

    def unread(self, values: Columns, start: int = 1) -> Iterator[tuple[int, str]]:
        if self.names:
            return
        _, columns = self.parts(values)
        for row, labels in enumerate(columns[0], start):
            if len(_each_once(labels)) < len(labels):
                yield row, "the second of two equal labels of a row"


def _each_once(labels: Sequence[Any]) -> list[Any]:
    """Returns the labels of a row without those that it has had before."""
    # By type, too: 1 is not True. No dictionary: what is no label may be a list.
    typed = [(type(label), label) for label in labels]
    return [label for i, (_, label) in enumerate(typed) if typed[i] not in typed[:i]]


def _are_flags(labels: Sequence[Any]) -> bool:
    """Returns whether a list has a 0 or 1 of each class, in place of classes."""
    # A list of the classes 0 and 1 has each of them once.
    return len(labels) > 2 and all(label in (0, 1, "0", "1") for label in labels)


# --- texts that are compared ----------------------------------------------------------------------


@dataclass(frozen=True)
class Relevances(Texts):
    """A pair of texts, and how well they go together: from 0 to 1."""

    has_classes: bool = False

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = super().check(values, where, start)
        hint = "scores are from 0 to 1: divide them by the largest that there can be"
        _check_scores(values[-1], 0, where, start, hint)
        return empty

    def groups(self, values: Columns) -> Sequence[Any] | None:
        # A query has several texts, which one split has all of.
        return values[0]


@dataclass(frozen=True)
class Compared(RowFormat):
    """Texts whose vectors are compared: two with a score, or an anchor, a text that goes with it
    and others that do not."""

    has_scores: bool = False
    """The last column has scores."""

    cuts_texts = True

    @classmethod
    def of(cls, train: TrainConfig) -> "Compared":
        # --text-pair-column positive,negative: each has a column of its own.
        others = (train.text_pair_column or "").split(",")
        texts = _given(train.text_column, *(column.strip() for column in others))
        has_scores = train.label_column is not None
        if len(texts) < 2:
            raise UsageError(
                f"--task {train.task} compares texts, and rows have one column of them",
                "name the others: --text-pair-column positive, or positive,negative",
            )
        if has_scores and len(texts) > 2:
            raise UsageError(
                f"--label-column {train.label_column}: a score is of two texts, and "
                f"--text-pair-column {train.text_pair_column} makes {len(texts)}",
                "name one column with --text-pair-column, or leave --label-column out",
            )
        return cls((*texts, *_given(train.label_column)), has_scores=has_scores)

    @property
    def texts_apart(self) -> int:
        # Without the column of scores: True counts as 1.
        return len(self.columns) - self.has_scores

    @property
    def has_negatives_of_step(self) -> bool:
        return not self.has_scores and self.texts_apart == 2

    @property
    def neighbours(self) -> Mapping[str, str]:
        if not self.has_negatives_of_step:
            return {}
        columns = {
            "negative": "--preset pairs does not read: --preset triplets uses it"
        }
        for name in PAIR_LABELS:
            columns[name] = (
                "--preset pairs does not read: the texts of each row count as going together "
                f"(--label-column {name} uses it)"
            )
        return columns

    @property
    def kind(self) -> tuple[Any, ...]:
        return *super().kind, self.has_scores

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        if self.has_scores:
            hint = (
                "the cosine of two texts is to be their score, from 0 to 1 (or from -1): divide "
                "scores by the largest that there can be"
            )
            _check_scores(values[-1], -1, where, start, hint)
        # A row with several empty texts counts once.
        texts = values[: self.texts_apart]
        return sorted(set(_check_columns_of_texts(self.columns, texts, where, start)))

    def scores(self, values: Columns) -> Sequence[float]:
        if not self.has_scores:
            return ()
        return label_numbers(values[-1], "labels")

    def groups(self, values: Columns) -> Sequence[Any] | None:
        # An anchor may have several rows.
        return values[0]

    def texts(self, values: Columns) -> Iterable[Text]:
        return zip(*values[: self.texts_apart], strict=True)


def _check_scores(
    cells: Sequence[Any], least: int, where: str, start: int, hint: str
) -> None:
    """Raises UsageError for what is no number from `least` to 1."""
    numbers = label_numbers(cells, where, start)
    for row, (number, cell) in enumerate(zip(numbers, cells, strict=True), start):
        if not least <= number <= 1:
            raise UsageError(f"{where!r}: row {row} has the score {cell!r}", hint)


# --- words ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words(RowFormat):
    """A list of words, and a list of as many labels."""

    has_classes: bool = True

    cuts_texts = True

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = []
        for row, (words, labels) in enumerate(zip(*values, strict=True), start):
            self._check_row(words, labels, f"{where!r}: row {row}")
            if any_empty(labels):
                raise wrong_label(
                    where,
                    row,
                    None,
                    "each word has one label; O says: nothing",
                )
            if not words:
                empty.append(row)
        return empty

    def check_inputs(self, values: Columns, where: str) -> list[int]:
        empty = []
        for row, words in enumerate(values[0], start=1):
            is_list = isinstance(words, list)
            if not is_list or not all(isinstance(word, str) for word in words):
                raise UsageError(
                    f"{where!r}: row {row} has {shown(repr(words))}, which is no list of words",
                    'a row is {"tokens": ["Ada", "slept"]}',
                )
            if not words:
                empty.append(row)
        return empty

    @staticmethod
    def _check_row(words: Any, labels: Any, what: str) -> None:
        for name, cells in (("words", words), ("labels", labels)):
            if not isinstance(cells, list | tuple):
                raise UsageError(
                    f"{what} has the {name} {cells!r}, which are no list",
                    'a row is {"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}; choose the '
                    "columns with --text-column and --label-column",
                )
        if len(words) != len(labels):
            raise UsageError(
                f"{what} has {len(words)} words and {len(labels)} labels",
                "each word has one label; O where it is none of what is looked for",
            )
        # Of millions of words all are right, as a rule: none is looked at by itself then.
        if {str}.issuperset(map(type, words)):
            return
        for word in words:
            if not isinstance(word, str):
                raise UsageError(
                    f"{what} has the word {word!r}, no string", "write it in quotes"
                )

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        of_rows = map(itertools.repeat, itertools.count(start))
        # Without a step of Python for each of millions of words.
        return itertools.chain.from_iterable(map(zip, of_rows, values[-1]))

    def texts(self, values: Columns) -> Iterable[Text]:
        return map(" ".join, values[0])


# --- conversations, texts that become texts -------------------------------------------------------

_WRITTEN_ROWS = 50
"""Rows that a submission has the chat template write: it may refuse almost all."""
ROLES = (*SYSTEM_ROLES, "user", "tool", "assistant")


@dataclass(frozen=True)
class Chats(RowFormat):
    """Conversations: lists of messages; with a system turn, tools and functions beside them."""

    model: str | None = None
    """The model whose chat template writes them."""
    reads_tools: bool = False
    """The third column has the tools; else it is read to name what is left out."""

    @classmethod
    def of(cls, train: TrainConfig) -> RowFormat:
        if train.preset == "completion":
            return Targets.of(train)
        # An optional column that is absent is read as None in every row.
        tools = train.tools_column or OptionalColumn("tools")
        columns = (
            *_given(train.text_column),
            OptionalColumn("system"),
            tools,
            OptionalColumn("functions"),
        )
        return cls(columns, model=train.model, reads_tools=bool(train.tools_column))

    @property
    def neighbours(self) -> Mapping[str, str]:
        what = "nothing reads: models are trained on text alone"
        return dict.fromkeys(("images", "image", "videos", "audios"), what)

    def check_with_model(self, values: Columns, where: str) -> None:
        write = local_template(self.model)
        if write is None:
            return
        with_form = 0
        for row, (messages, tools) in enumerate(self.conversations(values), start=1):
            # Rows that not every template writes are looked for among all.
            if row > _WRITTEN_ROWS:
                if not has_form(messages) or with_form >= _WRITTEN_ROWS:
                    continue
                with_form += 1
            write_row = functools.partial(write, tools=tools)
            written(write_row, messages, f"{where!r}: row {row}", self.model)

    def conversations(self, values: Columns) -> Iterator[Conversation]:
        """Yields the messages and the tools of each row, as chat templates take them."""
        for messages, system, tools, _ in zip(*values, strict=True):
            tools_of_row = None
            if self.reads_tools:
                tools_of_row = tools_of(tools)
            yield with_system(messages_of(messages), system), tools_of_row

    def unread(self, values: Columns, start: int = 1) -> Iterator[tuple[int, str]]:
        template = local_template_text(self.model)
        for row, (messages, _, tools, functions) in enumerate(
            zip(*values, strict=True), start
        ):
            if tools and not self.reads_tools:
                yield row, "the column 'tools' (--tools-column tools reads it)"
            if functions:
                yield row, "the column 'functions' (which is written as tools today)"
            if template is not None:
                for key in unread_keys(messages_of(messages), template):
                    yield row, f"the key {key!r} of messages, which the template lacks"

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = []
        for row, messages in enumerate(self._checked(values, where, start), start):
            first = _number_of_first(messages, values[0][row - start])
            self._check_contents(messages, where, row, first)
            # What a user or a system says may be empty; there must be something to learn.
            answers = [each for each in messages if each["role"] == "assistant"]
            if not answers:
                raise self._wrong(where, row, "no message of the assistant")
            learnt = list(filter(is_learnt, answers))
            if not learnt:
                what = (
                    "no message of the assistant that is learnt: all have the weight 0"
                )
                raise self._wrong(where, row, what)
            if all(map(self._is_empty_answer, learnt)):
                empty.append(row)
        return empty

    def _check_tools(self, tools: Sequence[Any], where: str, start: int) -> None:
        for row, value in enumerate(tools, start):
            try:
                tools_of(value)
            except ValueError:
                raise UsageError(
                    f"{where!r}: row {row} has the tools {shown(repr(value))}",
                    'tools are a list of JSON schemas, or its JSON: [{"type": "function", '
                    '"function": {"name": "...", "parameters": {...}}}]',
                ) from None

    def inputs(self) -> tuple[str, ...]:
        return self.columns

    def check_inputs(self, values: Columns, where: str) -> list[int]:
        empty = []
        for row, conversation in enumerate(self._checked(values, where), start=1):
            # The turn that is predicted may be null already.
            messages = prompt_messages(conversation)
            first = _number_of_first(conversation, values[0][row - 1])
            self._check_contents(messages, where, row, first)
            if all(is_empty(text_of(message)) for message in messages):
                empty.append(row)
        return empty

    def _checked(
        self, values: Columns, where: str, start: int = 1
    ) -> Iterator[list[dict[str, Any]]]:
        """Yields the messages of each row; UsageError where something of it cannot be right."""
        conversations, systems, tools, _ = values
        if self.reads_tools:
            self._check_tools(tools, where, start)
        pairs = zip(conversations, systems, strict=True)
        for row, (conversation, system) in enumerate(pairs, start):
            yield self._messages(conversation, system, where, row)

    def _messages(
        self, conversation: Any, system: Any, where: str, row: int
    ) -> list[dict[str, Any]]:
        """Returns the messages of a row; UsageError where one cannot be right."""
        try:
            messages = with_system(messages_of(conversation), system)
        except FormError as error:
            raise self._wrong(where, row, str(error)) from None
        # What is raised where a text, a number or null stands in place of messages.
        except (TypeError, KeyError, AttributeError):
            what = f"the messages {shown(repr(conversation))}"
            raise self._wrong(where, row, what) from None
        for place, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES:
                raise self._wrong(where, row, f"a message of the role {role!r}")
            # Templates write no prompt of no message.
            if role == "assistant" and place == 0:
                what = "a first message of the assistant, which answers nothing"
                raise self._wrong(where, row, what)
        return messages

    def _check_contents(
        self, messages: Sequence[dict[str, Any]], where: str, row: int, first: int
    ) -> None:
        try:
            check_contents(messages, first)
        except FormError as error:
            raise self._wrong(where, row, str(error)) from None

    @staticmethod
    def _is_empty_answer(message: dict[str, Any]) -> bool:
        """Returns whether a turn of the assistant has neither a text nor a tool call."""
        return is_empty(text_of(message)) and "tool_calls" not in message

    def texts(self, values: Columns) -> Iterable[Text]:
        for messages, _ in self.conversations(values):
            yield "\n".join(map(text_of, messages))

    @staticmethod
    def _wrong(where: str, row: int, what: str) -> UsageError:
        return UsageError(
            f"{where!r}: row {row} has {what}",
            'a row is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
            f'"content": "..."}}]}}, or in the form of ShareGPT; roles are {", ".join(ROLES)}; for '
            "prompts and completions there is --preset completion",
        )


def _number_of_first(messages: Sequence[Any], conversation: Sequence[Any]) -> int:
    """Returns what number the first of these messages has in the conversation of its row: 0 for a
    system turn that stands beside it."""
    return 1 - (len(messages) - len(conversation))


@dataclass(frozen=True)
class Targets(RowFormat):
    """A text, and the text that is to be made of it."""

    @property
    def neighbours(self) -> Mapping[str, str]:
        # Those of Alpaca's rows, beside which a prompt is only a part of what is asked.
        what = f"nothing reads: write it into the column {self.columns[0]!r}, where it is asked"
        return dict.fromkeys(("instruction", "input", "system", "history"), what)

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        return _check_columns_of_texts(self.columns, values, where, start)


@dataclass(frozen=True)
class Passages(RowFormat):
    """A part of a long text."""

    @classmethod
    def of(cls, train: TrainConfig) -> "Passages":
        return cls(_given(train.text_column))

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        return _check_columns_of_texts(self.columns, values, where, start)


# --- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Questions(RowFormat):
    """SQuAD's: a question, its context, and where its answers are in that."""

    columns: tuple[str, ...] = SQUAD_COLUMNS
    may_have_none: bool = False
    """A question may have no answer."""

    @classmethod
    def of(cls, train: TrainConfig) -> "Questions":
        return cls(may_have_none=train.preset == "v2")

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        # Identifier, question and context are texts; the answers come as an object.
        empty = _check_columns_of_texts(self.columns, values[:3], where, start)
        for cells in zip(*values, strict=True):
            Question.of(cells, where, self.may_have_none)
        return empty

    def groups(self, values: Columns) -> Sequence[Any] | None:
        # A context has several questions: a model must not be tried on one that it has read.
        return values[2]

    def inputs(self) -> tuple[str, ...]:
        return self.columns[1:3]

    def questions(self, values: Columns) -> Iterable[tuple[str, str]]:
        for name, question in zip(*values[:2], strict=True):
            yield f"question {name!r}", question

    def texts(self, values: Columns) -> Iterable[Text]:
        return zip(*values[1:3], strict=True)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and where its answers are in the context."""

    id: str
    question: str
    context: str
    answers: list[str]
    starts: list[int]
    """Character at which each answer begins."""

    @classmethod
    def of(cls, cells: Sequence[Any], where: str, may_have_none: bool) -> "Question":
        """Returns the question of a row, whose cells are those of `SQUAD_COLUMNS`.

        Raises:
            UsageError: an answer is not where it is said to be, or there is none where there must
                be one.
        """
        name, question, context, gold = cells
        what = f"{where!r}: question {name!r}"
        try:
            texts = list(gold["text"])
            starts = list(gold["answer_start"])
            pairs = list(zip(texts, starts, strict=True))
            misplaced = []
            for text, start in pairs:
                # A negative start would count from the end of the context.
                if start < 0 or not context.startswith(text, start):
                    misplaced.append((text, start))
        # The cell may hold anything; zip raises ValueError for lists of different lengths.
        except (TypeError, KeyError, ValueError):
            raise UsageError(
                f"{what} has the answers {gold!r}",
                'they are written as {"text": ["..."], "answer_start": [0]}',
            ) from None
        if misplaced:
            text, start = misplaced[0]
            raise UsageError(
                f"{what} has the answer {text!r}, which is not at character {start} of its context",
                "answer_start counts characters, not bytes, from 0",
            )
        if not all(texts):
            raise UsageError(
                f"{what} has an empty answer",
                'a question without an answer has none at all: {"text": [], "answer_start": []}',
            )
        if not pairs and not may_have_none:
            raise UsageError(
                f"{what} has no answer", "for such questions there is --preset v2"
            )
        return cls(name, question, context, texts, starts)
