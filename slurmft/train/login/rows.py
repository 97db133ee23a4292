"""Rows of data files: .csv, .tsv, .jsonl, .txt (.gz too), .parquet and .arrow, read and written.

The login node and the ranks read local files by this code: what a rank would refuse after hours in
a queue is refused at submission. It needs neither torch nor numpy. Rows are counted from 1; the
header of a .csv is none.
"""

import codecs
import contextlib
import csv
import datetime
import gzip
import io
import itertools
import json
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurmft.core import removal
from slurmft.core.errors import UsageError, nearest, one_line
from slurmft.core.files import open_regular, parse_json, to_json
from slurmft.core.removal import aside_of
from slurmft.core.text import shown, some

SQUAD_COLUMNS = ("id", "question", "context", "answers")
_CHUNK_ROWS = 1000
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
"""Escape of half of a character in JSON; most stand in pairs."""
_BINARY = {
    b"PK\x03\x04": ("a spreadsheet or another .zip", "open it, and save it as CSV (UTF-8)"),
    b"\xd0\xcf\x11\xe0": ("a spreadsheet", "open it, and save it as CSV (UTF-8)"),
    b"\x1f\x8b": ("a .gz", "add .gz to its name"),
    b"PAR1": ("a .parquet", "name it so"),
    b"ARROW1": ("an .arrow", "name it so"),
    b"version https://git-lfs": (
        "a pointer of git-lfs to the file", "fetch the file, in its repository: git lfs pull"
    ),
}  # fmt: skip
"""How files begin that are no text, what they are, and what to do."""
_WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\b|html\b)", re.IGNORECASE)
"""How web pages begin, which servers send in place of a file."""
_COPY_AGAIN = "copy or write it again"
_MOST_WORDS_OF_NAME = 3
"""A column of a longer name is more probably a text: the file has no header."""
_ROWS_OF_HEADER = 1000
"""Rows in which a cell of the first one is looked for, to tell whether that one is a header."""
_BYTES_OF_ENCODING = 2**24
"""Bytes that show whether a file is UTF-8."""
_ROWS_OF_SEPARATOR = 100
"""Rows that show which character is between the cells."""
_LINES_A_ROW = 100
"""Lines of a plain text that make one row."""
_BLOCK_BYTES = 2**20
_LINE_BYTES = 2**26
"""Most bytes of a line: a file with a longer one is of another kind."""
_LINE_END = re.compile(rb"\r*\n|\r")
_JSON_SPACE = " \t\r\n"
"""What JSON may have around a value."""
_decode_json = json.JSONDecoder().raw_decode


class ShardRow(int):
    """Number of a row of one of several files; its text names the file."""

    file: str

    def __new__(cls, number: int, file: str) -> "ShardRow":
        row = super().__new__(cls, number)
        row.file = os.path.basename(file)
        return row

    def __str__(self) -> str:
        return f"{int(self)} of {self.file}"


class OptionalColumn(str):
    """Name of a column that a file may lack: its cells are None then."""


class Chunk(NamedTuple):
    """Some rows of a split."""

    share: float
    """Share of the split that is read by then."""
    columns: list[list[Any]]
    """Values of each column."""
    where: str
    """File that has them, or its name in messages."""
    first_row: int
    """Number of the first one in that file."""

    def number(self, row: int, split: str) -> int:
        """Returns the number of a row of this file, as messages about a split name it."""
        if self.where == split:
            return row
        return ShardRow(row, self.where)


def files_of(path: Path) -> list[Path]:
    """Returns the files of a split: of a name with a star, all that it stands for, in order."""
    if "*" in path.name and not path.exists():
        return sorted(path.parent.glob(path.name))
    return [path]


def read_chunks(path: Path, names: Sequence[str]) -> Iterator[Chunk]:
    """Reads columns of a file, or of the files of a split, some rows at a time.

    Args:
        path: see `files_of`.
        names: names of the columns.

    Raises:
        UsageError: a file is not of the kind that its name says, is not UTF-8, or has no such
            column, or two of that name; there are no rows.
    """
    files = files_of(path)
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r}: {error}",
            "give a file that you may read",
        ) from None
    total = sum(sizes)
    bytes_before = 0
    has_rows = False
    for file, size in zip(files, sizes, strict=True):
        for chunk in _chunks_of_file(file, names):
            share = (bytes_before + chunk.share * size) / total
            yield chunk._replace(share=share)
            has_rows = True
        bytes_before += size
    if not has_rows:
        hint = "it has the names of its columns alone: add rows, or give another file"
        if _kind(path) == "jsonl":
            hint = "its lines are empty: add rows, or give another file"
        if not total:
            hint = f"it is empty: {_COPY_AGAIN}"
        raise UsageError(f"{str(path)!r} has no rows", hint)


def _chunks_of_file(path: Path, names: Sequence[str]) -> Iterator[Chunk]:
    rows_before = 0
    with _opened(path) as raw:
        size_bytes = os.fstat(raw.fileno()).st_size
        rows = _READERS[_kind(path)](raw, path, names)
        next(rows, None)  # the names, which the caller has
        wrong_row: UsageError | None = None
        while wrong_row is None:
            chunk: list[list[Any]] = []
            try:
                for row in itertools.islice(rows, _CHUNK_ROWS):
                    chunk.append(row)
            except UsageError as error:
                wrong_row = error
            # Also before an error: of these rows one may be wrong in another way.
            if chunk:
                share = raw.tell() / size_bytes  # of the packed bytes, if it is a .gz
                columns = [list(column) for column in zip(*chunk, strict=True)]
                yield Chunk(share, columns, str(path), rows_before + 1)
                rows_before += len(chunk)
            elif wrong_row is None:
                return
        raise wrong_row


def _kind(path: Path) -> str:
    """Returns the ending of a file's name in small letters, without that of gzip."""
    return path.name.lower().removesuffix(".gz").rpartition(".")[2]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file; whatever it cannot be read for is a UsageError."""
    try:
        # Not a FIFO, which would be waited for.
        with open_regular(path) as raw:
            yield raw
    # EOFError and zlib.error are of a .gz that was cut off, or is none.
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}", _COPY_AGAIN) from None


def _all_names(path: Path, most: int | None) -> list[str]:
    """Returns the names of all columns of a file.

    Args:
        most: thousands of rows of a .jsonl to look at, whose rows need not have the same keys.
    """
    with _opened(path) as raw:
        if _kind(path) != "jsonl":
            return next(_READERS[_kind(path)](raw, path, ()), [])
        names: dict[str, None] = {}
        rows = most and most * _CHUNK_ROWS
        for number, _, row in itertools.islice(_objects(raw, path), rows):
            for name in row.keys() - names.keys():
                _check_whole(name, name, path, number)
            names |= dict.fromkeys(row)
    return [OptionalColumn(name) for name in names]


def read_columns(
    path: Path,
    names: Sequence[str] = (),
    most: int | None = None,
) -> dict[str, list[Any]]:
    """Reads columns of a file; see `read_chunks`.

    Args:
        names: names of the columns; none: all, of a .jsonl those of all its rows.
        most: thousands of rows to read; None: all.
    """
    names = names or _all_names(path, most)
    chunks = itertools.islice(read_chunks(path, names), most)
    columns_of_chunks = [chunk.columns for chunk in chunks]
    columns = []
    for parts in zip(*columns_of_chunks, strict=True):
        columns.append(list(itertools.chain(*parts)))
    return dict(zip(names, columns, strict=True))


# --- writing --------------------------------------------------------------------------------------


def write_rows(
    path: Path,
    columns: Mapping[str, Sequence[Any]],
    source: Path | None = None,
) -> None:
    """Writes columns as a .csv, .tsv, .jsonl or .parquet file, whole or not at all; a column of
    vectors alone as a .npy file, too.

    Args:
        source: the file that rows are of: what a .parquet has keeps its types in another one.
    """
    # Written beside its place and renamed: nobody sees half a file.
    aside = aside_of(path)
    # Opened here: libraries would follow a link that others put there, and numpy would add an
    # ending to the name.
    with open(aside, "xb") as file:
        inode = os.fstat(file.fileno()).st_ino
        try:
            _write_columns(file, path.suffix, columns, source)
            file.flush()
            # Network filesystems may say only here that the disk is full.
            os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            # It is there still where the disk was full.
            removal.discard(aside, inode=inode)


def _write_columns(
    file: BinaryIO,
    suffix: str,
    columns: Mapping[str, Sequence[Any]],
    source: Path | None,
) -> None:
    """Writes columns into a file, in the form that the ending of its name says."""
    if suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(_parquet_table(columns, source), file)
        return
    if suffix == ".npy":
        import numpy as np

        (vectors,) = columns.values()
        np.save(file, np.asarray(vectors))
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    match suffix:
        case ".jsonl":
            _write_jsonl(text, columns)
        case ".tsv":
            _write_csv(text, columns, "\t")
        case _:
            _write_csv(text, columns, ",")
    # Detached: its end would close the file.
    text.detach()


def _parquet_table(columns: Mapping[str, Sequence[Any]], source: Path | None) -> Any:
    """Returns columns as a table of pyarrow; what `source` has of them is as it has it."""
    import pyarrow.parquet

    if source is None or _kind(source) != "parquet":
        return pyarrow.table(dict(columns))
    with _opened(source) as raw:
        table = pyarrow.parquet.read_table(raw)
    # Its metadata, which stays, has the numbers of such an index.
    index_name, _ = _index_of_numbers(table.schema.metadata, table.num_rows)
    for name, cells in columns.items():
        if name not in (*table.column_names, index_name):
            table = table.append_column(name, pyarrow.array(cells))
    return table


def check_writable(
    columns: Mapping[str, Sequence[Any]], output: Path, where: str
) -> None:
    """Raises UsageError where a file of the kind of `output` has no form for a column.

    Args:
        where: the file that has the columns, in messages.
    """
    # The one has none of them, the other all as they are.
    if output.suffix == ".npy" or output.suffix == Path(where).suffix == ".parquet":
        return
    hint = "give an --output of another kind, or take the column out"
    for name, cells in columns.items():
        if output.suffix == ".parquet":
            _check_parquet(name, cells, where, hint)
            continue
        for row, cell in enumerate(cells, start=1):
            if isinstance(cell, str | int | float | None):
                continue
            try:
                to_json(_plain(cell))
            except (TypeError, ValueError):
                kind = type(cell).__name__
                raise UsageError(
                    f"{where!r}: the column {name!r} has in row {row} what a {output.suffix} has "
                    f"no form for: {kind} {shown(repr(cell))}",
                    hint,
                ) from None


def _check_parquet(name: str, cells: Sequence[Any], where: str, hint: str) -> None:
    """Raises UsageError where a .parquet has no type for a column, as for numbers among texts."""
    import pyarrow.parquet

    try:
        table = pyarrow.table({name: cells})
        # The schema alone: some types, such as objects without keys, fail there.
        pyarrow.parquet.write_table(table.slice(0, 0), io.BytesIO())
    except (pyarrow.ArrowException, OverflowError) as error:
        raise UsageError(
            f"{where!r}: a .parquet has no type for the column {name!r}: "
            f"{one_line(error)}",
            hint,
        ) from None


def _write_jsonl(file: Any, columns: Mapping[str, Sequence[Any]]) -> None:
    for cells in zip(*columns.values(), strict=True):
        row = dict(zip(columns, map(_plain, cells), strict=True))
        file.write(f"{to_json(row)}\n")


def _write_csv(file: Any, columns: Mapping[str, Sequence[Any]], separator: str) -> None:
    writer = csv.writer(file, delimiter=separator)
    quoting: Any = csv.QUOTE_MINIMAL
    all_cells = itertools.chain(*columns.values())
    has_lines = any(isinstance(cell, str) and "\n" in cell for cell in all_cells)
    # By quotes in the header `_has_quoted_cells` knows that they are no part of texts.
    if separator == "\t" and has_lines:
        quoting = csv.QUOTE_ALL
    csv.writer(file, delimiter=separator, quoting=quoting).writerow(columns)
    for cells in zip(*columns.values(), strict=True):
        row = list(cells)
        for place, cell in enumerate(cells):
            cell = _plain(cell)
            row[place] = cell
            # A .csv has no lists and objects: it gets their JSON.
            if isinstance(cell, list | dict):
                row[place] = to_json(cell)
        writer.writerow(row)


def _plain(cell: Any) -> Any:
    """Returns a cell as text files hold it: of numpy's vectors, lists; of dates and times their
    form in ISO 8601; of decimal numbers all digits."""
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    if isinstance(cell, Decimal):
        return str(cell)
    if hasattr(cell, "tolist"):
        return cell.tolist()
    return cell


# --- lines of UTF-8 -------------------------------------------------------------------------------


def _lines(raw: BinaryIO, path: Path) -> Iterator[str]:
    """Yields the lines of a text file, each with its end."""
    stream = _text_stream(raw, path)
    block = stream.read(_BLOCK_BYTES)
    # The first line tells how all end: old Macs, and Excel for them, write no "\n".
    first_end = _LINE_END.search(block)
    end = b"\n"
    if first_end and first_end[0] == b"\r":
        end = b"\r"
    first_line, *_ = block.split(end, 1)
    # UTF-16 of plain letters is UTF-8, too.
    if first_line.count(0) > len(first_line) / 4:
        raise _not_utf8(path, 1, first_line, first_line.index(0))
    number = 1  # of the first line of a block
    for whole_lines in _blocks_of_lines(stream, block, end, path):
        wrong_line: UsageError | None = None
        try:
            text = whole_lines.decode()
        except UnicodeDecodeError as error:
            before = whole_lines[: error.start]
            begin = before.rfind(end) + 1
            line, *_ = whole_lines[begin:].split(end, 1)
            at_line = number + before.count(end)
            wrong_line = _not_utf8(path, at_line, line, error.start - begin)
            # The lines before it come first: one of them may be wrong in another way.
            text = whole_lines[:begin].decode()
        if number == 1:
            text = text.removeprefix("\ufeff")  # Excel's byte order mark
        # A split takes the ends away; behind the last one, nothing is left.
        *ended_lines, last_line = text.split(end.decode())
        for ended_line in ended_lines:
            yield ended_line + end.decode()
        if last_line:
            yield last_line
        if wrong_line is not None:
            raise wrong_line
        number += len(ended_lines)


def _blocks_of_lines(
    stream: BinaryIO, block: bytes, end: bytes, path: Path
) -> Iterator[bytes]:
    """Yields what a file holds, some whole lines at a time; UsageError for a line that is too long.

    Args:
        block: what is read of it already.
        end: what ends a line.
    """
    # A line of several blocks is joined once: each join copies it.
    begun: list[bytes] = []
    while block:
        lines, line_end, rest = block.rpartition(end)
        if not line_end and len(begun) * _BLOCK_BYTES > _LINE_BYTES:
            if _kind(path) != "txt":
                raise UsageError(
                    f"{str(path)!r} has a line of more than {_LINE_BYTES // 2**20} MiB",
                    "each row is a line, or a few: write long texts into several rows",
                )
            # A plain text may be one line.
            lines, line_end, rest = block.rpartition(b" ")
        if line_end:
            yield b"".join([*begun, lines, line_end])
            begun = []
        begun.append(rest)
        block = stream.read(_BLOCK_BYTES)
    if any(begun):
        yield b"".join(begun)


def _text_stream(raw: BinaryIO, path: Path) -> Any:
    """Returns the unpacked contents of a file whose name says that it is text.

    Raises:
        UsageError: it is of another kind.
    """
    stream: Any = raw
    if path.suffix.lower() == ".gz":
        if raw.read(2) not in (b"\x1f\x8b", b""):
            name = as_argument(path)
            raise UsageError(
                f"{str(path)!r} is no .gz, whatever its name says",
                f"name it as it is: mv {name} {as_argument(path.with_suffix(''))}",
            )
        raw.seek(0)
        # Over the same file: `read_chunks` asks that one how far it has come.
        stream = gzip.GzipFile(fileobj=raw)
    beginning = stream.read(256)
    stream.seek(0)
    # A plain text may be one.
    if _WEB_PAGE.match(beginning) and _kind(path) != "txt":
        raise UsageError(
            f"{str(path)!r} is a web page, whatever its name says",
            "download the file itself, not the page that shows it",
        )
    for magic, (kind, cure) in _BINARY.items():
        if beginning.startswith(magic):
            raise UsageError(
                f"{str(path)!r} is {kind}, whatever its name says",
                cure,
            )
    return stream


def as_argument(path: Path) -> str:
    """Returns a path as a word of a command to type: from this folder, if it is below."""
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    text = str(path)
    if text.startswith("-"):  # else it would be a flag
        text = f"./{text}"
    return shlex.quote(text)


def _unpacked(path: Path) -> tuple[str, str]:
    """Returns what to type before a command for plain text that changes a file, and the file that
    it changes then: a .gz is unpacked first."""
    file = as_argument(path)
    if path.suffix.lower() == ".gz":
        return f"gunzip {file} && ", as_argument(path.with_suffix(""))
    return "", file


def _rewritten(command: str, path: Path) -> str:
    """Returns the line that puts what a command makes of a file into its place."""
    unpack, file = _unpacked(path)
    return f"{unpack}{command} {file} > new && mv new {file}"


def _not_utf8(path: Path, number: int, line: bytes, at: int) -> UsageError:
    """Returns the error for a line that is not UTF-8, with the command that converts the file.

    Args:
        number: number of the line.
        at: place of the byte in it that UTF-8 does not have there.
    """
    if not line.strip(b"\0\r\n"):
        return UsageError(
            f"{str(path)!r}: line {number} holds nothing but zeros (bytes of 0)",
            "it was not written or copied to its end: write it anew",
        )
    what = f"{str(path)!r}: line {number} is not UTF-8"
    has_mark = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark or line[at] == 0:
        # a byte order mark, by which iconv tells the two below apart
        if line[0] > 0x7F:
            encoding = "UTF-16"
        elif at % 2:  # of a plain letter the second byte is 0
            encoding = "UTF-16LE"
        else:
            encoding = "UTF-16BE"
        return UsageError(
            f"{what} but {encoding}, as Excel's Unicode text is",
            f"convert it: {_rewritten(f'iconv -f {encoding} -t UTF-8', path)}",
        )
    if b"\0" in line:
        return UsageError(
            f"{str(path)!r} is no text: line {number} has bytes of 0",
            "save it as CSV (UTF-8), or give another file",
        )
    # The word with that byte, as Windows-1252 reads it: whoever knows the data sees if it fits.
    text_before = line[:at].decode("cp1252", "replace")
    text_after = line[at:].decode("cp1252", "replace")
    begin = text_before.split(" ")[-1]
    end = re.split(r"[\s,;]", text_after)[0]
    word = shown(begin[-30:] + end[:30])
    return UsageError(
        f"{what}: it has the byte 0x{line[at]:02x}",
        f"if {word!r} is right there, the file is Windows-1252 (latin-1): "
        f"{_rewritten('iconv -f WINDOWS-1252 -t UTF-8', path)}",
    )


# --- kinds of files -------------------------------------------------------------------------------
# Each reader yields the names of its columns first, then the cells of every row.


def _csv(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    csv.field_size_limit(_LINE_BYTES)  # csv's own limit is 128 KiB
    lines = _lines(raw, path)
    head = _to_first_text(lines)
    header_line = ""
    if head:
        header_line = head[-1]
    separator = _separator(header_line, path, names)
    # strict: else a quote that nobody closes would swallow the rest of the file unseen.
    quoting: Any = csv.QUOTE_MINIMAL
    if separator == "\t" and not _has_quoted_cells(path):
        quoting = csv.QUOTE_NONE
    all_lines = itertools.chain(head, lines)
    reader = csv.reader(all_lines, delimiter=separator, strict=True, quoting=quoting)
    where = str(path)
    first_line = 1  # of the row that is read
    try:
        header = next((row for row in reader if any(map(str.strip, row))), [])
        first_line = reader.line_num + 1
        if not header:
            return
        _check_header(header, path, names, separator)
        chosen = _chosen(where, names, header)
        yield chosen
        # A cell behind the row stands for a column that the file lacks.
        columns = [*header, None]
        places = [columns.index(name if name in header else None) for name in chosen]
        for row in reader:
            # An empty line, as pandas takes it; of one column, blanks are a cell.
            if not row or (len(row) == 1 < len(header) and not row[0].strip()):
                first_line = reader.line_num + 1
                continue
            if len(row) != len(header):  # often an unquoted comma: cells would move
                raise UsageError(
                    f"{where!r}: line {reader.line_num} has {len(row)} cells, not the header's "
                    f"{len(header)}",
                    _cure_of_cells(path, row, len(header), separator),
                )
            first_line = reader.line_num + 1
            cells: list[Any] = [*row, None]
            yield [cells[place] for place in places]
    except csv.Error as error:
        raise _bad_row(path, error, reader.line_num, first_line) from None


def _cure_of_cells(path: Path, row: Sequence[str], columns: int, separator: str) -> str:
    """Returns what to do about a row that has not as many cells as there are columns."""
    hint = 'a cell that holds a comma is written in quotes: "a, b"'
    if len(row) < columns:
        hint = 'a cell that holds a line break is written in quotes; an empty one is "", too'
    other = "\t"
    kinds = "commas separate the names in the header, tabs the cells of this row"
    change = r"s/,/\t/g"
    if separator == "\t":
        hint = "cells are separated by tabs; one that holds a tab is written in quotes"
        other = ","
        kinds = "tabs separate the names in the header, commas the cells of this row"
        change = r"s/\t/,/g"
    if columns == 1 or "".join(row).count(other) != columns - 1:
        return hint
    unpack, file = _unpacked(path)
    cure = f"{kinds}; if all rows are so: {unpack}sed -i '1{change}' {file}"
    if len(row) == 1:
        return cure
    return f"{hint}; or {cure}"


def _bad_row(
    path: Path, error: csv.Error, line_number: int, first_line: int
) -> UsageError:
    """Returns the error for a row that csv cannot read.

    Args:
        path: the file.
        error: what csv says.
        line_number: how far csv has read.
        first_line: where the row begins.
    """
    where = str(path)
    if str(error).startswith("new-line character"):
        lines_anew = _rewritten(r"tr '\r' '\n' <", path)
        return UsageError(
            f"{where!r}: line {line_number} has a carriage return within a cell",
            "if lines end so, as of old Macs and some spreadsheets: "
            f"{lines_anew}; else write the cell in quotes",
        )
    problem = f"line {line_number}: {error}"
    # csv reads on to the next quote, or to the end of the file.
    if line_number > first_line or str(error) == "unexpected end of data":
        problem = f"a quote is left open in the row that begins in line {first_line}"
    return UsageError(
        f"{where!r}: {problem}",
        'a cell that holds a quote is written in quotes, with two of them: "say ""hi"""',
    )


def _has_quoted_cells(path: Path) -> bool:
    """Returns whether quotes at the begin of cells of a table with tabs are around them, as csv and
    pandas write them; else they are part of the texts, as in GLUE's files.

    It goes by the names of the columns, then by the first row that only one of both readings has
    whole, with as many cells as there are columns.

    Raises:
        UsageError: nothing tells whether some lines are one row.
    """
    with _opened(path) as raw:
        lines = filter(str.strip, _lines(raw, path))
        header = next(lines, "")
        if header.startswith('"') or '\t"' in header:
            return True
        tabs = header.count("\t")
        row_lines: list[str] = []

        def noted() -> Iterator[str]:
            # Rows without quotes are the same in both readings.
            for line in itertools.dropwhile(lambda line: '"' not in line, lines):
                row_lines.append(line)
                yield line

        reader = csv.reader(noted(), delimiter="\t", strict=True)
        undecided = ""
        while True:
            row_lines.clear()
            cells: list[str] | None = []
            with contextlib.suppress(csv.Error):
                cells = next(reader, None)
            if cells is None:
                break
            is_row = len(cells) == tabs + 1
            are_rows = all(line.count("\t") == tabs for line in row_lines)
            if is_row != are_rows:
                return is_row
            if is_row and len(row_lines) > 1:
                undecided = row_lines[0]
    if undecided:
        raise UsageError(
            f"{str(path)!r}: the line {shown(undecided)!r} and the next may be two rows, or one "
            "with quotes around a cell",
            "put quotes around the names of the columns if they are one; else write a .jsonl",
        )
    return True


def _check_header(
    header: Sequence[str], path: Path, names: Sequence[str], separator: str
) -> None:
    """Raises UsageError where the first row lacks a name, and looks like a row."""
    missing = [
        name
        for name in names
        if name not in header and not isinstance(name, OptionalColumn)
    ]
    if not missing:
        return
    _check_no_words(path, names)
    cells = [cell for cell in header if cell.strip()]
    has_text = any(len(cell.split()) > _MOST_WORDS_OF_NAME for cell in cells)
    has_number = any(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", cell) for cell in cells)
    if has_text or has_number or _comes_again(header, path, separator):
        line = separator.join(names)
        if len(names) != len(header):
            line = separator.join(("text", "label", "..."))
        line = line.replace("\t", r"\t")
        unpack, file = _unpacked(path)
        raise UsageError(
            f"{str(path)!r} has no column {missing[0]!r}: it begins with a row, without the names "
            f"of columns: {shown(', '.join(header))}",
            "write the names above it, in the order of the columns: "
            f"{unpack}sed -i '1i {line}' {file}",
        )


def _comes_again(header: Sequence[str], path: Path, separator: str) -> bool:
    """Returns whether a cell of the first row stands in its column again, as a class does and the
    name of a column does not."""
    with _opened(path) as raw, contextlib.suppress(csv.Error):
        reader = csv.reader(_lines(raw, path), delimiter=separator)
        for row in itertools.islice(reader, 1, _ROWS_OF_HEADER):
            # The whole header comes again where files were put behind one another.
            if row == list(header) or len(row) != len(header):
                continue
            if any(
                cell and cell == name for cell, name in zip(row, header, strict=True)
            ):
                return True
    return False


def _to_first_text(lines: Iterator[str]) -> list[str]:
    """Takes lines up to the first one that is not blank, the header, and returns them all."""
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return head


def _separator(header: str, path: Path, names: Sequence[str]) -> str:
    """Returns the character between the cells of a file, by its header: a comma or a tab.

    Raises:
        UsageError: it seems to be another one.
    """
    if _kind(path) == "tsv":
        if "," in header and "\t" not in header and header.strip() not in names:
            name = re.sub(r"\.tsv(?=(\.gz)?$)", ".csv", path.name, flags=re.IGNORECASE)
            csv_path = path.with_name(name)
            raise UsageError(
                f"{str(path)!r}: its cells are separated by commas: {shown(header)!r}",
                f"name it so: mv {as_argument(path)} {as_argument(csv_path)}",
            )
        return "\t"
    _check_first_line(header, path)
    if "\t" in header and ("," not in header or _has_columns_of_tabs(path)):
        return "\t"
    if "," in header:
        return ","
    for separator, name in (
        (";", "semicolons"),
        ("|", "vertical bars"),
    ):
        if separator in header and header.strip() not in names:
            raise UsageError(
                f"{str(path)!r}: its cells are separated by {name}: {shown(header)!r}",
                f"separate them by commas or tabs: {_with_commas(path, separator)}",
            )
    return ","


def _has_columns_of_tabs(path: Path) -> bool:
    """Returns whether the first rows of a file with commas and tabs are separated by tabs: they
    have as many tabs as the header each, and not as many commas."""
    with _opened(path) as raw:
        lines = filter(str.strip, _lines(raw, path))
        first = list(itertools.islice(lines, _ROWS_OF_SEPARATOR + 1))
    tabs = {line.count("\t") for line in first}
    commas = {line.count(",") for line in first}
    return len(tabs) == 1 and len(commas) > 1


def _with_commas(path: Path, separator: str, skipped: int = 0) -> str:
    """Returns the command that writes a .csv anew, in UTF-8 with commas between its cells, without
    the first `skipped` lines."""
    options = f"sep='{separator}', dtype=str"
    if not _is_utf8(path):
        # The other encoding that spreadsheets write: a byte that it lacks is an error of pandas.
        options += ", encoding='cp1252'"
    if skipped:
        options += f", skiprows={skipped}"
    write = f"pandas.read_csv(n, {options}).to_csv(n, index=False)"
    file = as_argument(path)
    return f'python -c "import pandas, sys; n = sys.argv[1]; {write}" {file}'


def _is_utf8(path: Path) -> bool:
    """Returns whether the beginning of a file is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _opened(path) as raw:
        try:
            # A character may be cut off at the end of what is read.
            decoder.decode(_text_stream(raw, path).read(_BYTES_OF_ENCODING))
        except UnicodeDecodeError:
            return False
    return True


def _check_first_line(line: str, path: Path) -> None:
    """Raises UsageError for the line that tells a spreadsheet what separates the cells."""
    match = re.fullmatch(r"sep=(.)[;,\t]*", line.strip("\ufeff\r\n"))
    if match:
        raise UsageError(
            f"{str(path)!r}: its first line, {shown(line)!r}, is for spreadsheets alone",
            f"write the file without it: {_with_commas(path, match[1], skipped=1)}",
        )


def _json(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    chosen: list[str] = []
    for number, line, row in _objects(raw, path):
        # Rows need not have the same keys: the first one names the columns.
        if not chosen:
            chosen = _chosen(str(path), names, list(row))
            yield chosen
        cells = [row.get(name) for name in chosen]
        if _SURROGATE.search(line):
            for name, cell in zip(chosen, cells, strict=True):
                _check_whole(cell, name, path, number)
        yield cells


def _check_whole(cell: Any, name: str, path: Path, number: int) -> None:
    """Raises UsageError where a text of a cell has half of a character, which no file of UTF-8
    can hold and no tokenizer takes.

    Args:
        name: that of the column.
        number: of the line.
    """
    try:
        json.dumps(cell, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        raise UsageError(
            f"{str(path)!r}: line {number} has half of a character in the column "
            f"{name!a}: {half}",
            "JSON writes such a character as two escapes (\\ud83d\\ude00): one was cut off; take "
            "the other one out",
        ) from None


def _objects(raw: BinaryIO, path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the number, the text and the object of each line that is not blank."""
    for number, line in enumerate(_lines(raw, path), start=1):
        text = line.strip(_JSON_SPACE)
        # Blank lines may have other spaces, as that which does not break.
        if not text or text.isspace():
            continue
        try:
            # Half the time of `json.loads`, for short rows.
            row, end_of_row = _decode_json(text)
        except (ValueError, RecursionError):  # the latter for thousands of brackets
            row = None
        else:
            if end_of_row != len(text):  # a second value follows
                row = None
        if not isinstance(row, dict):
            end = ""
            hint = 'each line is one row: {"text": "...", "label": "..."}'
            cure = ""
            if number == 1:
                cure = cure_of_json(path)
            if not cure and not line.endswith("\n"):
                end = ", where the file ends: is it whole?"
            raise UsageError(
                f"{str(path)!r}: line {number} is no JSON object: {shown(line)!r}{end}",
                cure or hint,
            )
        yield number, line, row


_OTHER_JSON = {
    rb"\[": "json.load(file)",
    rb'\{(?s:.){,99}"data":\s*\[(?s:.)*?"paragraphs":': (
        "({'id': qa['id'], 'question': qa['question'], 'context': part['context'], "
        "'answers': {'text': [each['text'] for each in qa['answers']], "
        "'answer_start': [each['answer_start'] for each in qa['answers']]}} "
        "for article in json.load(file)['data'] for part in article['paragraphs'] "
        "for qa in part['qas'])"
    ),
    rb'\{\s*"(data|train|rows)":\s*\[\s*\{': "next(iter(json.load(file).values()))",
    rb'\{\s*"\w+":\s*\{\s*"0":': (
        "(dict(zip(table, cells)) for table in [json.load(file)] "
        "for cells in zip(*(column.values() for column in table.values())))"
    ),
}  # fmt: skip
"""How JSON begins that has not a row a line: a list, SQuAD's articles, rows below a name, pandas'
columns. With the expression of Python that makes rows of it."""


def cure_of_json(file: Path) -> str:
    """Returns the command that writes the rows of a file of JSON a row a line; "": they are so, or
    there is no telling."""
    try:
        with open_regular(file) as raw:
            beginning = raw.read(_BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (OSError, ValueError):  # whatever reads it says so
        return ""
    for pattern, rows in _OTHER_JSON.items():
        if re.match(pattern, beginning):
            new = file.with_suffix(".jsonl")  # the same one, where it is named so
            code = (
                "import json, sys; old, new = sys.argv[1:]; "
                f"file = open(old, encoding='utf-8-sig'); rows = {rows}; "
                "open(new, 'w').writelines(json.dumps(row) + '\\n' for row in rows)"
            )
            names = f"{as_argument(file)} {as_argument(new)}"
            return f'write a row a line: python -c "{code}" {names}'
    return ""


_TAG = re.compile(r"O|[BIESLU][-_].+")
"""The label of a word in the schemes of seqeval."""
_COMMENTS = ("#", "-DOCSTART-")
"""How lines of CoNLL's files begin that have no word."""


def cure_of_words(file: Path) -> str:
    """Returns the command that writes the rows of a file in CoNLL's form a row a line; "": it is in
    another one.

    In that form a line has a word first and its label last, and a blank line ends a text.
    """
    try:
        with open_regular(file) as raw:
            beginning = raw.read(_BLOCK_BYTES)
    except (OSError, ValueError):  # whatever reads it says so
        return ""
    # The last line may be cut off.
    lines = beginning.decode(errors="replace").split("\n")[:-1]
    separator = None
    if b"\t" in beginning:
        separator = "\t"
    rows = [
        line.rstrip().split(separator)
        for line in lines
        if line.strip() and not line.startswith(_COMMENTS)
    ]
    widths = {len(row) for row in rows}
    # A word and its label; with others between them, all lines have as many.
    if len(widths) != 1 or min(widths) < 2:
        return ""
    if not all(_TAG.fullmatch(row[-1]) for row in rows):
        return ""
    new = file.with_suffix(".jsonl")
    cells = "split()"
    if separator:
        cells = "split(chr(9))"
    code = (
        "import itertools, json, sys; old, new = sys.argv[1:]; "
        "file = open(old, encoding='utf-8-sig'); "
        "texts = itertools.groupby(file, lambda line: bool(line.strip())); "
        f"rows = ([line.rstrip().{cells} for line in text if not line.startswith({_COMMENTS})] "
        "for is_text, text in texts if is_text); "
        "open(new, 'w').writelines(json.dumps({'tokens': [cells[0] for cells in row], "
        "'tags': [cells[-1] for cells in row]}) + '\\n' for row in rows if row)"
    )
    names = f"{as_argument(file)} {as_argument(new)}"
    command = f'python -c "{code}" {names}'
    # Of two files of a split none is read.
    if file.suffix in (".txt", ".tsv", ".csv"):
        command += (
            f" && mv {as_argument(file)} {as_argument(file.with_suffix('.conll'))}"
        )
    return f"write a text a line, with its words and labels: {command}"


def _check_no_words(path: Path, names: Sequence[str]) -> None:
    """Raises UsageError where a file lacks columns, as it is in CoNLL's form."""
    if cure := cure_of_words(path):
        raise UsageError(
            f"{str(path)!r} has a word a line, as files of CoNLL, and no columns "
            f"{' and '.join(names)}",
            cure,
        )


def _parquet(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    import pyarrow.parquet  # 100 ms: only a parquet file pays for it

    try:
        file = pyarrow.parquet.ParquetFile(raw)
        schema = file.schema_arrow
        index_name, index = _index_of_numbers(schema.metadata, file.metadata.num_rows)
        columns = [*schema.names]
        if index_name and index_name not in columns:
            columns.append(index_name)
        chosen = _chosen(str(path), names, columns)
        yield chosen
        present = [name for name in chosen if name in schema.names]
        rows_before = 0
        for batch in file.iter_batches(_CHUNK_ROWS, columns=present):
            if index_name in chosen and index_name not in present:
                end = rows_before + batch.num_rows
                numbers = pyarrow.array(index[rows_before:end], pyarrow.int64())
                batch = pyarrow.RecordBatch.from_arrays(
                    [*batch.columns, numbers], [*batch.schema.names, index_name]
                )
                rows_before = end
            yield from _rows_of_batch(batch, chosen)
    except pyarrow.ArrowException as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}", _COPY_AGAIN) from None


def _index_of_numbers(
    metadata: Mapping[bytes, bytes] | None, row_count: int
) -> tuple[str, range]:
    """Returns the name and the numbers of a pandas index that a file describes and holds in no
    column, as that of every second row; no numbers where there is none, or it counts all rows."""
    # Anybody may have written it, and rows are read without it.
    with contextlib.suppress(
        ValueError, TypeError, KeyError, AttributeError, OverflowError
    ):
        facts = parse_json((metadata or {})[b"pandas"])
        # Of other indexes it has the names of columns.
        (index,) = facts["index_columns"]
        numbers = range(index["start"], index["stop"], index["step"])
        # Other programs keep the description when they take rows out.
        is_whole = len(numbers) == row_count
        # Columns of whole numbers have 64 bits.
        has_type = max(abs(numbers.start), abs(numbers.stop)) < 2**63
        name = index["name"]
        is_count = not name and (numbers.start, numbers.step) == (0, 1)
        if is_whole and has_type and not is_count:
            return str(name or "__index_level_0__"), numbers
    return "", range(0)


def _arrow(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    """Yields the rows of a file that the datasets library, or Arrow, has written."""
    import pyarrow.ipc

    try:
        reader = _arrow_reader(raw)
        chosen = _chosen(str(path), names, reader.schema.names)
        yield chosen
        for batch in _batches(reader):
            # The library writes what it got at a time, which may be a whole split.
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                yield from _rows_of_batch(batch.slice(start, _CHUNK_ROWS), chosen)
    except pyarrow.ArrowException as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}", _COPY_AGAIN) from None


def _arrow_reader(raw: BinaryIO) -> Any:
    """Opens an Arrow file as a stream, which the datasets library writes, or as Arrow's files."""
    import pyarrow.ipc

    # Only files of the second kind begin with it.
    is_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    if is_file:
        return pyarrow.ipc.open_file(raw)
    return pyarrow.ipc.open_stream(raw)


def _batches(reader: Any) -> Iterator[Any]:
    if not hasattr(reader, "num_record_batches"):
        yield from reader
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _rows_of_batch(batch: Any, names: Sequence[str]) -> Iterator[list[Any]]:
    columns = []
    for name in names:
        cells = [None] * batch.num_rows
        if name in batch.schema.names:
            cells = batch.column(name).to_pylist()
        columns.append(cells)
    yield from map(list, zip(*columns, strict=True))


def class_names(path: Path) -> dict[str, list[str]]:
    """Returns the names of the classes of columns whose labels are numbers, as the datasets library
    writes them into .parquet and .arrow files; see `files_of`."""
    (file, *_) = files_of(path) or [path]
    if _kind(file) not in ("parquet", "arrow"):
        return {}
    import pyarrow.parquet

    try:
        with open(file, "rb") as raw:
            if _kind(file) == "arrow":
                schema = _arrow_reader(raw).schema
            else:
                schema = pyarrow.parquet.read_schema(raw)
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
    # Whatever cannot be read here, `read_chunks` reports.
    except (OSError, ValueError, AttributeError):
        return {}
    names = {}
    for column, feature in features.items():
        element = feature
        if isinstance(feature, list) and feature:  # as earlier versions wrote lists
            element = feature[0]
        elif isinstance(feature, dict) and "feature" in feature:
            element = feature["feature"]
        if isinstance(element, dict) and element.get("_type") == "ClassLabel":
            names[column] = element["names"]
    return names


def _text(raw: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    """Yields the parts of one long text, of whole lines."""
    # A text has one column.
    if any(not isinstance(name, OptionalColumn) for name in names[1:]):
        _check_no_words(path, names)
    chosen = _chosen(str(path), names, names[:1])
    yield chosen
    lines = _lines(raw, path)
    # Of the others a file may lack each.
    others = [None] * (len(chosen) - 1)
    while part := list(itertools.islice(lines, _LINES_A_ROW)):
        yield ["".join(part), *others]


_READERS: dict[str, Callable[[BinaryIO, Path, Sequence[str]], Iterator[list[Any]]]] = {
    "csv": _csv,
    "tsv": _csv,
    "jsonl": _json,
    "parquet": _parquet,
    "arrow": _arrow,
    "txt": _text,
}


def _chosen(where: str, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Returns the names of the columns to read; UsageError where the file lacks one."""
    for name in names:
        if name not in columns and not isinstance(name, OptionalColumn):
            raise no_column(where, name, columns)
    chosen = list(names or columns)
    for name in chosen:
        if columns.count(name) > 1:
            raise UsageError(
                f"{where!r} has {columns.count(name)} columns of the name {name!r}",
                f"give each a name of its own; it has {some(list(columns))}",
            )
    return chosen


def no_column(where: str, name: str, columns: Sequence[str]) -> UsageError:
    """Returns the error for a column that a file or data set does not have."""
    # A spreadsheet writes columns without a name behind the table.
    hint = f"it has {some([column for column in columns if column.strip()])}"
    near = nearest(name, columns)
    if near is not None:
        hint = f"did you mean {near!r}? {hint}"
    if name not in SQUAD_COLUMNS:  # whose names are fixed
        hint += "; choose with --text-column, --text-pair-column, --label-column"
    if "completion" in columns:
        hint += "; or give --preset completion"
    return UsageError(f"{where!r} has no column {name!r}", hint)
