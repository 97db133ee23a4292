"""Rows of data files and data sets: reading them, and what of them cannot be right.

The login node and the ranks read and check local files by this code: what a rank would refuse after
hours in a queue is refused at submission. It needs neither torch nor numpy. Rows are counted from
1; the header of a .csv is none.
"""

import codecs
import contextlib
import csv
import gzip
import itertools
import json
import math
import os
import re
import shlex
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from slurmft.core.errors import UsageError
from slurmft.core.files import aside_of, to_json
from slurmft.core.text import shown, some

SQUAD_COLUMNS = ("id", "question", "context", "answers")
MAX_LABELS = 100_000
_CHUNK_ROWS = 1000
_LINES_AT_ONCE = 100
"""Of a text, that are a row."""
_LINE_BYTES = 2**26
"""More are no row, but a file of another kind."""

# --- local files ----------------------------------------------------------------------------------


def read_chunks(path: Path, names: Sequence[str]) -> Iterator[tuple[float, list[list[Any]]]]:
    """Columns of a .jsonl, .csv, .tsv, .txt (.gz too) or .parquet file, some rows at a time.

    Args:
        names: of the columns; none: all of them, and their names come as the first row.

    Yields:
        The share of the file that is read by then, and the values of each column.

    Raises:
        UsageError: the file is none of these inside, is not UTF-8, has no rows or no such column.
    """
    read = _READERS[path.name.removesuffix(".gz").rpartition(".")[2]]
    share = 0.0
    try:
        with open(path, "rb") as raw:
            rows = read(raw, path, names)
            if names:
                next(rows, None)
            while part := list(itertools.islice(rows, _CHUNK_ROWS)):
                share = raw.tell() / os.fstat(raw.fileno()).st_size
                yield share, [list(column) for column in zip(*part, strict=True)]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    if not share:
        raise UsageError(f"{str(path)!r} has no rows")


def read_columns(
    path: Path, names: Sequence[str] = (), most: int | None = None
) -> dict[str, list[Any]]:
    """The columns of a file, see `read_chunks`; without names all, of a .jsonl those of its first
    row.

    Args:
        most: thousands of rows to read; None: all.
    """
    chunks = [columns for _, columns in itertools.islice(read_chunks(path, names), most)]
    whole = [list(itertools.chain(*parts)) for parts in zip(*chunks, strict=True)]
    return dict(zip(names, whole, strict=True)) if names else {v[0]: v[1:] for v in whole}


def write_rows(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes columns as a .csv, .tsv, .jsonl or .parquet file, whole or not at all."""
    aside, kind = aside_of(path), path.suffix[1:]
    try:
        if kind == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table(dict(columns)), aside)
        else:
            with open(aside, "x", encoding="utf-8", newline="") as file:
                rows = zip(*columns.values(), strict=True)
                if kind == "jsonl":
                    file.writelines(
                        f"{to_json(dict(zip(columns, row, strict=True)))}\n" for row in rows
                    )
                else:
                    writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
                    writer.writerow(columns)
                    writer.writerows([_cell(value) for value in row] for row in rows)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _cell(value: Any) -> Any:
    """A value in a .csv: of lists and objects their JSON."""
    return to_json(value) if isinstance(value, list | dict) else value


def _lines(raw: BinaryIO, path: Path) -> Iterator[str]:
    stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    for number, line in enumerate(iter(partial(stream.readline, _LINE_BYTES), b""), start=1):
        try:
            text: str = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, line, error.start) from None
        if number == 1 and text.count("\0") > len(text) / 4:
            raise _not_utf8(path, number, line, text.index("\0"))
        yield text.removeprefix("\ufeff") if number == 1 else text  # Excel's byte order mark


def _not_utf8(path: Path, number: int, line: bytes, at: int) -> UsageError:
    """What to say of a line that has a byte, at that place, which UTF-8 does not have there."""
    what = f"{str(path)!r}: line {number} is not UTF-8"
    convert = f"iconv -f {{}} -t UTF-8 {shlex.quote(path.name)} > new{path.suffix}"
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or not line[at]:
        kind = "UTF-16" if line[0] > 0x7F else "UTF-16LE" if at % 2 else "UTF-16BE"
        return UsageError(
            f"{what} but {kind}, as Excel's Unicode text is", f"convert it: {convert.format(kind)}"
        )
    *_, before = line[:at].decode("cp1252", "replace").split(" ")
    after, *_ = re.split(r"[\s,;]", line[at:].decode("cp1252", "replace"))
    return UsageError(
        f"{what}: it has the byte 0x{line[at]:02x}",
        f"if {shown(before[-30:] + after[:30])!r} is right there, the file is Windows-1252 "
        f"(latin-1): {convert.format('WINDOWS-1252')}",
    )


def _separator(header: str, path: Path, names: Sequence[str]) -> str:
    """What stands between the cells of a file, by its first line: a comma or a tab. UsageError
    where it seems to be a semicolon."""
    if path.name.removesuffix(".gz").endswith(".tsv"):
        return "\t"
    if "," in header or "\t" in header:
        return "," if "," in header else "\t"
    if ";" in header and header.strip() not in names:
        name = shlex.quote(path.name)
        write = "pandas.read_csv(n, sep=';', dtype=str).to_csv(n, index=False)"
        raise UsageError(
            f"{str(path)!r}: its cells are separated by semicolons: {shown(header)!r}",
            "separate them by commas or tabs: "
            f'python -c "import pandas, sys; n = sys.argv[1]; {write}" {name}',
        )
    return ","


def _csv(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    csv.field_size_limit(_LINE_BYTES)
    lines, where = _lines(raw, path), str(path)
    first = list[str]()
    while not (first and first[-1].strip()) and (line := next(lines, "")):
        first.append(line)
    separator = _separator("".join(first[-1:]), path, names)
    reader = csv.reader(itertools.chain(first, lines), delimiter=separator, strict=True)
    try:
        header = next(filter(None, reader), [])
        if not header:
            return
        chosen = _chosen(where, names, header)
        yield chosen
        places = [header.index(name) for name in chosen]
        for row in filter(None, reader):
            if len(row) != len(header):
                raise UsageError(
                    f"{where!r}: line {reader.line_num} has {len(row)} cells, not the header's "
                    f"{len(header)}",
                    'a cell that holds a comma is written in quotes: "a, b"'
                    if separator == ","
                    else "cells are separated by tabs; one that holds a tab is written in quotes",
                )
            yield [row[place] for place in places]
    except csv.Error as error:
        raise UsageError(
            f"{where!r}: line {reader.line_num}: {error}",
            'a cell that holds a quote is written in quotes, with two of them: "say ""hi"""',
        ) from None


def _json(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    chosen = list[str]()
    for number, line in enumerate(_lines(raw, path), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            end = "" if line.endswith("\n") else ", where the file ends: is it whole?"
            raise UsageError(
                f"{str(path)!r}: line {number} is no JSON object: {shown(line)!r}{end}",
                'each line is one row: {"text": "...", "label": "..."}',
            )
        if not chosen:
            chosen = _chosen(str(path), names, list(row))
            yield chosen
        yield [row.get(name) for name in chosen]


def _parquet(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    import pyarrow.parquet  # 100 ms: only a parquet file pays for it

    try:
        file = pyarrow.parquet.ParquetFile(raw)
        chosen = _chosen(str(path), names, file.schema_arrow.names)
        yield chosen
        for batch in file.iter_batches(_CHUNK_ROWS, columns=chosen):
            yield from map(list, zip(*(batch.column(n).to_pylist() for n in chosen), strict=True))
    except pyarrow.ArrowException as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None


def _text(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    """The parts of one long text, of whole lines."""
    yield _chosen(str(path), names, names[:1])
    lines = _lines(raw, path)
    while part := list(itertools.islice(lines, _LINES_AT_ONCE)):
        yield ["".join(part)]


_READERS = {"csv": _csv, "tsv": _csv, "jsonl": _json, "parquet": _parquet, "txt": _text}


def _chosen(where: str, names: Sequence[str], found: Sequence[str]) -> list[str]:
    """The columns to read of those that there are; the first row that a reader yields."""
    for name in names:
        if name not in found:
            raise no_column(where, name, found)
    return list(names or found)


def no_column(where: str, name: str, found: Sequence[str]) -> UsageError:
    is_fixed = name in SQUAD_COLUMNS
    flags = "" if is_fixed else "; choose with --text-column, --text-pair-column, --label-column"
    flags += "; or give --preset completion" if "completion" in found else ""
    return UsageError(f"{where!r} has no column {name!r}", f"it has {', '.join(found)}{flags}")


# --- labels ---------------------------------------------------------------------------------------


class Labels:
    """The labels of a split: how many there are of each, and in which row the first is."""

    def __init__(self, where: str, values: Sequence[Any] = ()) -> None:
        """Those of `where`: all `values`, or `add` gets them in parts."""
        self.where, self.rows = where, 0
        self.counts: Counter[tuple[type, Any]] = Counter()
        """By type and value: 1 is not True."""
        self.first: dict[tuple[type, Any], int] = {}
        self.empty: list[int] = []
        self.add(enumerate(values, 1))

    def add(self, values: Iterable[tuple[int, Any]]) -> None:
        """Counts labels, each given with the number of its row; UsageError where one is a list or
        an object, or there are too many."""
        for row, value in values:
            self.rows += 1
            if is_empty(value):
                self.empty.append(row)
                continue
            if isinstance(value, (list, dict)) or len(self.counts) > MAX_LABELS:
                raise wrong_label(self.where, row, value)
            self.first.setdefault((type(value), value), row)
            self.counts[type(value), value] += 1

    def check_empty(self) -> None:
        """Raises UsageError where rows have no label."""
        if self.empty:
            raise UsageError(
                f"{self.where!r}: {len(self.empty):,} of {self.rows:,} rows have no label: "
                f"{row_words(self.empty)}",
                "give them one, or take them out; rows are counted from 1, without the header",
            )

    def names(self) -> list[str]:
        """The names of the classes: texts by the alphabet, numbers by value.

        Raises:
            UsageError: rows without a label; values of another type, or of several; all the same,
                or all different.
        """
        self.check_empty()
        if not self.first:
            raise UsageError(f"{self.where!r}: no row has a label", _CHOOSE_LABEL_COLUMN)
        (kind, _), *_ = self.first
        for (own, value), row in self.first.items():
            if own is not kind or kind not in (str, int, bool):
                number = "; numbers on a scale: --task text-regression" * (kind is float)
                hint = f"labels are all texts or all whole numbers{number}; {_CHOOSE_LABEL_COLUMN}"
                raise wrong_label(self.where, row, value, hint)
        values = [value for _, value in self.counts]
        if len(values) == 1 or len(values) == self.rows:
            same = (
                f"the one label {values[0]!r}" if len(values) == 1 else "another label in every row"
            )
            raise UsageError(f"{self.where!r} has {same}", _CHOOSE_LABEL_COLUMN)
        written = kind is str and all(value.isdecimal() for value in values)
        return [str(value) for value in sorted(values, key=int if written else None)]

    def shares(self) -> str:
        """ "'joy' 5,362 (34 %), 'anger' 2,159 (13 %)" """
        total = self.counts.total()
        counts = self.counts.most_common()
        return some([f"{v!r} {n:,} ({100 * n / total:.0f} %)" for (_, v), n in counts], 6)

    def oddities(self) -> Iterator[str]:
        """Warnings of labels that differ only by white space or case, or are written as floats."""
        written = [v for kind, v in self.counts if kind is str and _WHOLE.fullmatch(v)]
        if written and len(written) == len(self.counts):
            yield (
                f"{self.where!r} has whole numbers as labels that are written as floats, which "
                f"become the names of the classes: {some([repr(v) for v in sorted(written)])}; "
                f"{_AS_FLOATS}; numbers on a scale: --task text-regression"
            )
        alike = defaultdict(list)
        for value in (value for kind, value in self.counts if kind is str):
            alike[" ".join(value.split()).casefold()].append(value)
        for values in (values for values in alike.values() if len(values) > 1):
            yield (
                f"{self.where!r} has labels that differ only by white space or case, and are "
                "classes of their own: "
                + some([f"{value!r} ({self.counts[str, value]:,} rows)" for value in values])
            )


def row_words(rows: Sequence[int]) -> str:
    """ "rows 3, 9, 12, 15, 20 and 7 more" """
    more = f" and {len(rows) - 5:,} more" if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:5]))}{more}"


_CHOOSE_LABEL_COLUMN = "choose the column with --label-column"


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing, or white space alone."""
    if isinstance(value, str):
        return not value or value.isspace()
    return value is None or value != value  # NaN, as pandas writes


_WHOLE = re.compile(r"-?\d+\.0+")
_AS_FLOATS = "pandas writes them so where a cell was empty: .astype('Int64') writes 1, not 1.0"


def wrong_label(where: str, row: int, value: Any, hint: str = _CHOOSE_LABEL_COLUMN) -> UsageError:
    if _WHOLE.fullmatch(str(value)):
        hint = f"it is a whole number, written as a float; {_AS_FLOATS}; {hint}"
    return UsageError(f"{where!r}: row {row} has the label {value!r}", hint)


def label_ids(
    values: Iterable[Any],
    names: Sequence[str],
    where: str,
    by_number: bool = True,
    rows: Iterable[int] | None = None,
) -> list[int]:
    """Labels, given as names or (unless not `by_number`) as numbers, as numbers; UsageError for one
    beyond the known ones. `rows` are the numbers of their rows, from 1, if not given."""
    written = {str(i): i for i in range(len(names))} if by_number else {}  # as a .csv has them
    by_name = written | {name: i for i, name in enumerate(names)}
    known = f"0 to {len(names) - 1}, or {', '.join(names)}" if by_number else ", ".join(names)
    ids = []
    for row, value in zip(rows or itertools.count(1), values, strict=False):
        named = isinstance(value, str) or not by_number
        label = by_name.get(str(value)) if named else value
        if type(label) is not int or not 0 <= label < len(names):
            raise wrong_label(where, row, value, f"labels are {known}")
        ids.append(label)
    return ids


def label_numbers(values: Sequence[Any], where: str, start: int = 1) -> list[float]:
    """Labels that are numbers, as floats; UsageError for one that is none. `start` is the number of
    the first row."""
    for row, value in enumerate(values, start):
        with contextlib.suppress(TypeError, ValueError):  # a .csv has them as texts
            if not isinstance(value, bool) and math.isfinite(float(value)):
                continue
        raise wrong_label(where, row, value, f"labels are numbers; {_CHOOSE_LABEL_COLUMN}")
    return [float(value) for value in values]


# --- texts ----------------------------------------------------------------------------------------


def check_texts(values: Sequence[Any], where: str, start: int = 1) -> list[int]:
    """The rows of a column's texts that are empty; UsageError for a value that is no text."""
    for row, value in enumerate(values, start):
        if value is None:
            raise UsageError(f"{where!r}: row {row} has no text")
        if not isinstance(value, str):
            raise UsageError(f"{where!r}: row {row} has the text {value!r}, which is no string")
    return [row for row, value in enumerate(values, start) if not value or value.isspace()]
