"""Values of rows: labels and texts, and what of them cannot be right.

Rows are counted from 1; the header of a .csv is none.
"""

import itertools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.text import counted, some
from slurmft.train.login.rows import SQUAD_COLUMNS

MAX_LABELS = 100_000
"""Most different labels of a split."""
_CHOOSE_LABEL_COLUMN = "choose the column with --label-column"
_ONE_CLASS = (
    f"there are two classes or more: add rows of others, or {_CHOOSE_LABEL_COLUMN}"
)
_NUMBER = re.compile(r"[+-]?\d*[.,]?\d+([eE][+-]?\d+)?( ?%)?")
"""Numbers on a scale, also as spreadsheets write them."""
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+")
_DECIMAL = re.compile(r"-?\d+([.,]\d+)?")
"""Numbers as they are written for people, also with a comma."""
_MOST_RATINGS = 20
"""Of so many numbers with fractions, each may be a class: ratings in halves have ten."""
_WHOLE_FLOAT = re.compile(r"-?\d+\.0+")
_AS_FLOATS = (
    "pandas writes them so where a cell was empty: .astype('Int64') writes 1, not 1.0"
)
_ONE_WAY = "write each in one way, as pandas' .str.strip().str.lower().str.normalize('NFC') does"
_ROWS_NAMED = 5


def is_empty(value: Any) -> bool:
    """Returns whether a cell holds nothing, or white space alone."""
    if isinstance(value, str):
        return not value or value.isspace()
    # NaN, which pandas writes for an empty cell, is the one value that differs from itself.
    return value is None or value != value


def any_empty(values: Iterable[Any]) -> bool:
    """Returns whether one of some cells is empty, see `is_empty`."""
    cells = list(values)
    try:
        # Of texts alone, without a call of ours for each: words have millions of labels.
        return not all(map(str.strip, cells))
    except TypeError:
        return any(map(is_empty, cells))


def describe_rows(rows: Sequence[int]) -> str:
    """Returns the numbers of rows as text: "rows 3, 9, 12, 15, 20 and 7 more"."""
    noun = "rows"
    if len(rows) == 1:
        noun = "row"
    numbers = ", ".join(map(str, rows[:_ROWS_NAMED]))
    text = f"{noun} {numbers}"
    others = len(rows) - _ROWS_NAMED
    if others > 0:
        text += f" and {others:,} more"
    return text


# --- labels ---------------------------------------------------------------------------------------


class Labels:
    """Counts of the labels of a split, and the row in which each is first.

    Args:
        where: name of the split in messages.
        values: all labels of the split, unless `add` gets them in parts.
    """

    def __init__(self, where: str, values: Sequence[Any] = ()) -> None:
        self.where = where
        self.rows = 0
        self.counts: Counter[tuple[type, Any]] = Counter()
        """By type and value: 1 is not True."""
        self.first: dict[tuple[type, Any], int] = {}
        """Number of the row in which a label is first, by type and value."""
        self.empty: list[int] = []
        self.add(enumerate(values, 1))

    def add(
        self,
        values: Iterable[tuple[int, Any]],
        number: Callable[[int], int] = int,
    ) -> None:
        """Counts labels, each with its row.

        Args:
            number: returns the number of a row, as messages have it.

        Raises:
            UsageError: a label is a list or an object, or there are too many different ones.
        """
        labelled = list(values)
        labels = [value for _, value in labelled]
        self.rows += len(labelled)
        kinds = set(map(type, labels))
        # Of one type, and all there before, as in most parts of a file: words have millions of
        # labels. Texts alone are counted fast, and not with their type beside each.
        if len(kinds) == 1 and kinds <= {str, int, bool}:
            (kind,) = kinds
            counts = {(kind, value): count for value, count in Counter(labels).items()}
            if counts.keys() <= self.first.keys():
                self.counts.update(counts)
                return
        for row_in_file, value in labelled:
            key = (type(value), value)
            # Lists and objects are keys of no dictionary.
            if key[0] not in (list, dict) and key in self.first:
                self.counts[key] += 1
                continue
            row = number(row_in_file)
            if is_empty(value):
                self.empty.append(row)
                continue
            if isinstance(value, list | dict):
                raise wrong_label(self.where, row, value)
            # So many different ones are texts, or identifiers: counting goes no further.
            if len(self.counts) > MAX_LABELS:
                raise wrong_label(self.where, row, value)
            self.first[key] = row
            self.counts[key] = 1

    def check_empty(self) -> None:
        """Raises UsageError where rows have no label."""
        if self.empty:
            raise UsageError(
                f"{self.where!r}: {len(self.empty):,} of {self.rows:,} rows have no label: "
                f"{describe_rows(self.empty)}",
                "give them one, or take them out; rows are counted from 1, without the header",
            )

    def names(self, part: str = "") -> list[str]:
        """Returns the names of the classes: texts by the alphabet, numbers by value.

        Args:
            part: says how the rows are drawn from the training data; "": they are all.

        Raises:
            UsageError: rows without a label; values of another type, or of several; all the same,
                or all different.
        """
        self.check_empty()
        if not self.first:
            problem = f"{self.where!r}: no row has a label"
            raise UsageError(problem, _CHOOSE_LABEL_COLUMN)
        # Sorted below: values of several types do not compare.
        kind = self._one_type()
        values = [value for _, value in self.counts]
        if len(values) == 1:
            problem = f"has the one label {values[0]!r}"
            raise self._no_classes(problem, part, _ONE_CLASS)
        self._check_scale(kind)
        if len(values) == self.rows:
            # Texts, or identifiers of rows: a class has several rows.
            hint = f"a class has several rows: add rows, or {_CHOOSE_LABEL_COLUMN}"
            if kind is int or all(_DECIMAL.fullmatch(str(value)) for value in values):
                hint += ", or learn the numbers, written as 0.5: --task text-regression"
            raise self._no_classes("has another label in every row", part, hint)
        # Texts of digits, as a .csv has them: 2 comes before 10.
        if kind is str and all(value.isdecimal() for value in values):
            values.sort(key=int)
        else:
            values.sort()
        return [str(value) for value in values]

    def _no_classes(
        self, problem: str, part: str, hint: str = _CHOOSE_LABEL_COLUMN
    ) -> UsageError:
        """Returns the error for labels that are no classes; `part` as in `names`."""
        # All rows have classes: taking a part checks that each has several.
        if part:
            return UsageError(
                f"{self.where!r}: the training split, {part}, {problem}",
                "give another fraction, or a validation file, or add rows of each class",
            )
        return UsageError(f"{self.where!r} {problem}", hint)

    def _check_scale(self, kind: type) -> None:
        """Raises UsageError for texts that are numbers on a scale, as a .csv has them."""
        if kind is not str or len(self.first) <= _MOST_RATINGS:
            return
        are_numbers = all(_NUMBER.fullmatch(value) for _, value in self.first)
        if are_numbers and not all(value.isdecimal() for _, value in self.first):
            (_, value), row = next(iter(self.first.items()))
            raise wrong_label(
                self.where,
                row,
                value,
                f"{len(self.first):,} different numbers are a scale: --task text-regression"
                f"{_as_number(value)}; {_CHOOSE_LABEL_COLUMN}",
            )

    def _one_type(self) -> type:
        """Returns the type of all labels; UsageError where there are several, or another one."""
        first_type = next(iter(self.first))[0]
        for (kind, value), row in self.first.items():
            if kind is not first_type or kind not in (str, int, bool):
                # Floats are no classes: most often they are a scale that is to be learnt.
                hint = "labels are all texts or all whole numbers"
                if first_type is float:
                    hint += "; numbers on a scale: --task text-regression"
                raise wrong_label(
                    self.where,
                    row,
                    value,
                    f"{hint}; {_CHOOSE_LABEL_COLUMN}",
                )
        return first_type

    @property
    def type_name(self) -> str:
        """Name of the type of all labels, which `names` has checked."""
        return next(iter(self.first))[0].__name__

    def oddities(self) -> Iterator[str]:
        """Yields warnings of labels that differ by white space, case or Unicode normal form alone,
        or look like floats."""
        texts = [value for kind, value in self.counts if kind is str]
        # All labels, not some: "1.0" among words is a name like others.
        floats = [text for text in texts if _WHOLE_FLOAT.fullmatch(text)]
        if floats and len(floats) == len(self.counts):
            class_names = [repr(text) for text in sorted(floats)]
            yield (
                f"{self.where!r} has whole numbers as labels that are written as floats, which "
                f"become the names of the classes: {some(class_names)}; "
                f"{_AS_FLOATS}; numbers on a scale: --task text-regression"
            )
        by_normal_form = defaultdict(list)
        for text in texts:
            by_normal_form[_normal_form(text)].append(text)
        described = []
        for variants in by_normal_form.values():
            if len(variants) == 1:
                continue
            # An accent looks the same as a character of its own.
            quote: Callable[[str], str] = repr
            if len({_composed(text) for text in variants}) < len(variants):
                quote = ascii
            for text in variants:
                count = self.counts[str, text]
                described.append(f"{quote(text)} ({counted(count, 'row')})")
        if described:
            yield (
                f"{self.where!r} has labels that differ only by white space, case or Unicode "
                f"normal form, and are classes of their own: {some(described)}; {_ONE_WAY}"
            )


def _composed(text: str) -> str:
    """Returns a text in Unicode's normal form NFC: an accent is no character of its own."""
    return unicodedata.normalize("NFC", text)


def _normal_form(label: str) -> str:
    """Returns what labels have in common that people take for the same."""
    with_single_blanks = " ".join(label.split())
    return _composed(with_single_blanks.casefold())


def shares(counts: Counter[Any]) -> str:
    """Returns the share of each class: "'joy' 5,362 (34 %), 'anger' 2,159 (13 %)"."""
    total = counts.total()
    described = []
    for name, count in counts.most_common():
        percent = 100 * count / total
        described.append(f"{name!r} {count:,} ({percent:.0f} %)")
    return some(described, 6)


def wrong_label(
    where: str,
    row: int,
    value: Any,
    hint: str = _CHOOSE_LABEL_COLUMN,
) -> UsageError:
    """Returns the error for a label that cannot be right."""
    if _WHOLE_FLOAT.fullmatch(str(value)):
        hint = f"it is a whole number, written as a float; {_AS_FLOATS}; {hint}"
    return UsageError(f"{where!r}: row {row} has the label {value!r}", hint)


def label_ids(
    values: Iterable[Any],
    names: Sequence[str],
    where: str,
    by_number: bool = True,
    rows: Iterable[int] | None = None,
    numbered: Sequence[str] | None = None,
) -> list[int]:
    """Returns the numbers of classes that are labels of rows.

    Args:
        values: labels, as names or as numbers.
        names: names of the classes, by their numbers.
        where: name of the split in messages.
        by_number: a label may be the number of a class; else it is always a name.
        rows: numbers of the rows; None: 1, 2, and so on.
        numbered: names that the data itself has for its numbers; None: they are those of `names`.

    Raises:
        UsageError: a label that is no class.
    """
    ids_by_name = {name: number for number, name in enumerate(names)}
    # The class of each number: by its name, as the data may have its classes in another order.
    ids_by_number = [ids_by_name.get(name) for name in numbered or names]
    ids_by_text: dict[str, int | None] = {}
    if by_number:
        for number, class_id in enumerate(ids_by_number):
            ids_by_text[str(number)] = class_id
    # Second, so that a name goes before a number: a class may be called "1".
    ids_by_text |= ids_by_name
    ids = []
    # Not strict: the count has no end.
    for row, value in zip(rows or itertools.count(1), values, strict=False):
        label = None
        # In a .csv numbers are texts, too.
        if isinstance(value, str) or not by_number:
            label = ids_by_text.get(str(value))
        # type() and not isinstance(): True would be class 1.
        elif type(value) is int and 0 <= value < len(ids_by_number):
            label = ids_by_number[value]
        if label is None:
            hint = f"labels are {some(list(names))}"
            if by_number:
                hint = f"labels are 0 to {len(names) - 1}, or {some(list(names))}"
            else:  # those of the training data
                hint += (
                    "; add rows of this one to the training data, or take it out here"
                )
            for name in names:
                is_text = isinstance(value, str)
                if is_text and _normal_form(name) == _normal_form(value):
                    hint = f"it is not {name!a}, but {value!a}: {_ONE_WAY}"
            raise wrong_label(where, row, value, hint)
        ids.append(label)
    return ids


def names_of_numbers(
    names_in_data: Sequence[str],
    names: Sequence[str],
) -> Sequence[str] | None:
    """Returns the names that the numbers of a split stand for, where it has names for them; None:
    they are the numbers of the classes, whatever the split calls them.

    Args:
        names_in_data: its names, by number.
        names: names of the classes.
    """
    if set(names_in_data) & set(names):
        return names_in_data
    return None


def check_same_classes(
    labels: Labels,
    names: Sequence[str],
    numbered: Sequence[str],
    source: str,
) -> list[str]:
    """Checks, by their names, that labels of a source of --mix are classes of --data; returns the
    classes that the source lacks.

    Args:
        names: names of the classes of --data.
        numbered: names that the numbers of the source stand for; none: they are names themselves.
        source: the value of --mix.

    Raises:
        UsageError: it has other labels.
    """
    unknown = []
    ids = []
    for _, value in labels.first:
        try:
            by_number = bool(numbered)
            ids += label_ids([value], names, "", by_number, numbered=numbered)
        except UsageError:
            name = value
            if type(value) is int and 0 <= value < len(numbered):
                name = numbered[value]
            unknown.append(repr(name))
    if unknown:
        listed = some(sorted(unknown), 6)
        raise UsageError(
            f"--mix {source!r} has labels that --data does not have: {listed}",
            f"rename them, or take their rows out; --data has {some(list(names), 20)}",
        )
    return [name for number, name in enumerate(names) if number not in ids]


def label_numbers(values: Sequence[Any], where: str, start: int = 1) -> list[float]:
    """Returns labels that are numbers, as floats.

    Args:
        start: number of the first row.

    Raises:
        UsageError: a label that is no finite number.
    """
    numbers = []
    for row, value in enumerate(values, start):
        number = _to_float(value)
        if not math.isfinite(number):
            hint = f"labels are numbers{_as_number(str(value))}; {_CHOOSE_LABEL_COLUMN}"
            if str(value).strip().lower() in ("true", "false"):
                hint = "labels are numbers: write 1 for true and 0 for false"
            raise wrong_label(where, row, value, hint)
        numbers.append(number)
    return numbers


def _as_number(text: str) -> str:
    """Returns how a number that a spreadsheet has written is to be written, for the end of a hint;
    "": as it is, or it is none."""
    plain = text.strip().removesuffix("%").rstrip()
    if _WITH_COMMA.fullmatch(plain):
        point = plain.replace(",", ".")
        return (
            f", with a point: {point} (pandas.read_csv(..., decimal=',') reads commas)"
        )
    if plain != text.strip() and math.isfinite(_to_float(plain)):
        return f", without a sign: {plain}"
    return ""


def _to_float(value: Any) -> float:
    # To Python True is the number 1; to whoever wrote it, it is a class.
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # a .csv has numbers as texts
    except (TypeError, ValueError):
        return math.nan


# --- texts ----------------------------------------------------------------------------------------


def check_texts(
    column: str, values: Sequence[Any], where: str, start: int = 1
) -> list[int]:
    """Returns the numbers of rows whose text is empty, the first row having the number `start`.

    Args:
        column: name of the column, in messages.

    Raises:
        UsageError: a value that is no text.
    """
    empty = []
    for row, value in enumerate(values, start):
        # A .jsonl may lack the key in some rows; of a .csv the cell would be an empty text.
        if value is None:
            raise UsageError(
                f"{where!r}: row {row} has no text in the column {column!r}",
                "give it one, or take the row out",
            )
        if not isinstance(value, str):
            cure = "write it in quotes"
            # The names of SQuAD's are fixed.
            if column not in SQUAD_COLUMNS:
                flags = "--text-column, --text-pair-column, --label-column"
                cure += f", or choose another column with {flags}"
            raise UsageError(
                f"{where!r}: row {row} has {value!r} in the column {column!r}, which is no text",
                cure,
            )
        if not value or value.isspace():
            empty.append(row)
    return empty
