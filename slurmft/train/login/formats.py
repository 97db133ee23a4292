"""What the rows of a task are: their columns, and what of these cannot be right.

The login node and the ranks check rows by this code: what a rank would refuse after hours in a
queue is refused at submission. It needs neither torch nor numpy.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.text import shown
from slurmft.train.config import TrainConfig
from slurmft.train.login.rows import (
    SQUAD_COLUMNS,
    check_texts,
    is_empty,
    label_numbers,
    wrong_label,
)
from slurmft.train.own_task import facts

Text = str | tuple[str, ...]
"""A text, or a pair of them."""
Columns = Sequence[Sequence[Any]]
"""Values of some rows, by column."""


@dataclass(frozen=True)
class RowFormat(ABC):
    """The columns of a task, and the checks of their values. One for each configuration."""

    columns: tuple[str, ...]
    """Their names, in the order in which the checks get them."""
    has_classes: bool = False
    """Whether there must be labels that are classes."""
    names: tuple[str, ...] = ()
    """Of the classes, where columns are called by them."""

    @classmethod
    def of(cls, train: TrainConfig) -> "RowFormat":
        """That of a configuration; here of its columns of texts and of labels."""
        return cls(tuple(filter(None, (train.text_column, train.label_column))))

    @abstractmethod
    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        """Checks rows, of which the first has the number `start`; returns those without a text.
        UsageError for a value that cannot be right."""

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        """The labels that are classes, each with the number of its row."""
        yield from ()

    def texts(self, values: Columns) -> Iterable[Text]:
        """What a model reads of each row: for lengths, and to find what is there twice."""
        return values[0]


def format_of(train: TrainConfig) -> RowFormat:
    """What the rows of a configuration's task are."""
    rows = facts(train.task).rows
    kind: type[RowFormat] = globals()[rows] if isinstance(rows, str) else rows
    return kind.of(train)


@dataclass(frozen=True)
class Texts(RowFormat):
    """A text, or two, and a label: a class, or a number."""

    has_classes: bool = True

    @classmethod
    def of(cls, train: TrainConfig) -> "Texts":
        chosen = (train.text_column, train.text_pair_column, train.label_column)
        return cls(tuple(filter(None, chosen)), facts(train.task).labels != ())

    def parts(self, values: Columns) -> tuple[Columns, Columns]:
        """Columns of texts, and of labels."""
        texts = len(self.columns) - (len(self.names) or 1)
        return values[:texts], values[texts:]

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        texts, (labels,) = self.parts(values)
        empty = [row for column in texts for row in check_texts(column, where, start)]
        if not self.has_classes:
            label_numbers(labels, where, start)
        return empty

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        return enumerate(values[-1], start) if self.has_classes else iter(())

    def texts(self, values: Columns) -> Iterable[Text]:
        texts, _ = self.parts(values)
        return texts[0] if len(texts) == 1 else zip(*texts, strict=True)


@dataclass(frozen=True)
class ManyLabels(Texts):
    """A text, or two, and any number of classes: a list of them, or a column of 0 and 1 of each."""

    @classmethod
    def of(cls, train: TrainConfig) -> "ManyLabels":
        texts = tuple(filter(None, (train.text_column, train.text_pair_column)))
        labels = tuple(name.strip() for name in (train.label_column or "").split(","))
        return cls((*texts, *labels), names=labels if len(labels) > 1 else ())

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        texts, labels = self.parts(values)
        for name, cells in zip(self.names, labels, strict=False):
            for row, cell in enumerate(cells, start):
                if cell not in (0, 1, "0", "1"):
                    raise UsageError(
                        f"{where!r}: row {row} has {cell!r} in the column {name!r}",
                        "each of several columns of labels holds 0 or 1",
                    )
        for row, own in enumerate(() if self.names else labels[0], start):
            if not isinstance(own, (list, tuple)):
                raise UsageError(
                    f"{where!r}: row {row} has the labels {own!r}, which are no list",
                    'a row is {"text": "...", "labels": ["joy", "love"]}, or it has a column of 0 '
                    "and 1 of each class: --label-column joy,love,fear",
                )
            if any(map(is_empty, own)):
                raise wrong_label(where, row, None, "a text without classes has the labels []")
        return [row for column in texts for row in check_texts(column, where, start)]

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        _, columns = self.parts(values)
        for row, cells in enumerate(zip(*columns, strict=True), start):
            pairs = zip(self.names, cells, strict=False)
            own = [name for name, cell in pairs if int(cell)] if self.names else cells[0]
            yield from ((row, label) for label in own)


@dataclass(frozen=True)
class Words(RowFormat):
    """A list of words, and a list of as many labels."""

    has_classes: bool = True

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = []
        for row, (words, labels) in enumerate(zip(*values, strict=True), start):
            for what, cells in (("words", words), ("labels", labels)):
                if not isinstance(cells, (list, tuple)):
                    raise UsageError(
                        f"{where!r}: row {row} has the {what} {cells!r}, which are no list",
                        'a row is {"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}; choose the '
                        "columns with --text-column and --label-column",
                    )
            if len(words) != len(labels):
                raise UsageError(
                    f"{where!r}: row {row} has {len(words)} words and {len(labels)} labels",
                    "each word has one label; O where it is none of what is looked for",
                )
            if wrong := [word for word in words if not isinstance(word, str)]:
                raise UsageError(f"{where!r}: row {row} has the word {wrong[0]!r}, no string")
            if any(map(is_empty, labels)):
                raise wrong_label(where, row, None, "each word has one label; O says: nothing")
            empty += [] if words else [row]
        return empty

    def labels(self, values: Columns, start: int = 1) -> Iterator[tuple[int, Any]]:
        return ((row, label) for row, own in enumerate(values[-1], start) for label in own)

    def texts(self, values: Columns) -> Iterable[Text]:
        return map(" ".join, values[0])


ROLES = ("system", "developer", "user", "tool", "assistant")


@dataclass(frozen=True)
class Chats(RowFormat):
    """Conversations: lists of messages."""

    @classmethod
    def of(cls, train: TrainConfig) -> RowFormat:
        if train.preset == "completion":
            return Targets.of(train)
        return cls(tuple(filter(None, (train.text_column,))))

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = []
        for row, messages in enumerate(values[0], start):
            try:
                turns = [(each["role"], each["content"] + "") for each in messages]
            except (TypeError, KeyError):
                raise self._wrong(where, row, f"the messages {shown(repr(messages))}") from None
            if unknown := [role for role, _ in turns if role not in ROLES]:
                raise self._wrong(where, row, f"a message of the role {unknown[0]!r}")
            learnt = [text for role, text in turns if role == "assistant"]
            if not learnt:
                raise self._wrong(where, row, "no message of the assistant")
            empty += [row] if all(map(is_empty, learnt)) else []
        return empty

    def texts(self, values: Columns) -> Iterable[Text]:
        return ("\n".join(each["content"] for each in messages) for messages in values[0])

    @staticmethod
    def _wrong(where: str, row: int, what: str) -> UsageError:
        return UsageError(
            f"{where!r}: row {row} has {what}",
            'a row is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
            f'"content": "..."}}]}}; roles are {", ".join(ROLES)}; for prompts and completions '
            "there is --preset completion",
        )


@dataclass(frozen=True)
class Targets(RowFormat):
    """A text, and the text that is to be made of it; or a text alone."""

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        return sorted({row for texts in values for row in check_texts(texts, where, start)})


@dataclass(frozen=True)
class Questions(RowFormat):
    """SQuAD's: a question, its context, and where its answers are in that."""

    columns: tuple[str, ...] = SQUAD_COLUMNS
    may_have_none: bool = False

    @classmethod
    def of(cls, train: TrainConfig) -> "Questions":
        return cls(may_have_none=train.preset == "v2")

    def check(self, values: Columns, where: str, start: int = 1) -> list[int]:
        empty = [row for texts in values[:3] for row in check_texts(texts, where, start)]
        for row in zip(*values, strict=True):
            Question.of(row, where, self.may_have_none)
        return empty

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
    def of(cls, row: Sequence[Any], where: str, may_have_none: bool) -> "Question":
        """From the columns of the task; UsageError for an answer that is not where it is said to
        be, or none where there must be one."""
        name, question, context, gold = row
        what = f"{where!r}: question {name!r}"
        try:
            texts, starts = list(gold["text"]), list(gold["answer_start"])
            pairs = list(zip(texts, starts, strict=True))
            outside = next(
                (p for p in pairs if p[1] < 0 or not context.startswith(p[0], p[1])), None
            )
        except (TypeError, KeyError, ValueError):
            raise UsageError(
                f"{what} has the answers {gold!r}",
                'they are written as {"text": ["..."], "answer_start": [0]}',
            ) from None
        if outside:
            raise UsageError(
                f"{what} has the answer {outside[0]!r}, which is not at character {outside[1]} of "
                "its context",
                "answer_start counts characters, not bytes, from 0",
            )
        if not all(texts):
            raise UsageError(
                f"{what} has an empty answer",
                'a question without an answer has none at all: {"text": [], "answer_start": []}',
            )
        if not pairs and not may_have_none:
            raise UsageError(f"{what} has no answer", "for such questions there is --preset v2")
        return cls(name, question, context, texts, starts)
