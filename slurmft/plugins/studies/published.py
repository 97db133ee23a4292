"""Published tables, as files in the form of `results/published` hold them.

Such a file has `columns` and `rows`, or several `tables` that have them. No value is changed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.decode import matches
from slurmft.core.errors import UsageError
from slurmft.core.files import is_number, parse_json, read_text
from slurmft.core.text import shown

CONFIGURATION = "configuration"
"""Column of a chart's bars that are named PRECISION-BATCHSIZE."""

_HINT = "it must have columns and rows, or tables with them, as the files in results/published"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table: a row for every measurement. A file may have several."""

    file: str
    """The file's name without ending."""
    part: str
    """The last column's name, if the file has several tables; else empty."""
    work: str
    """What was measured in all tables of the file."""
    setup: dict[str, Any]
    """What was the same in all rows: model, precision, epochs, ..."""
    columns: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    footnotes: tuple[str, ...]
    """Source, setup, doubts."""

    @property
    def key(self) -> str:
        """The table's name in names of files."""
        if not self.part:
            return self.file
        return f"{self.file}-{self.part}"

    @property
    def name(self) -> str:
        """The table's name for people."""
        if not self.part:
            return self.work
        return f"{self.work}: {with_unit(self.part)}"


_THROUGHPUT = "_samples_per_s_per_gpu"
"""How the column of a throughput of one GPU ends."""


def speedups(table: PublishedTable) -> list[float | None]:
    """Returns the speedup of each row that follows from its throughput of one GPU.

    It is over the row with the fewest GPUs that is equal in all else; None where a row has no such
    number. An empty list: the table has no throughput of one GPU.
    """
    measured = table.columns[-1]
    if not measured.endswith(_THROUGHPUT) or "gpus" not in table.columns:
        return []
    rates = [_throughput(row, measured) for row in table.rows]
    # Series -> its fewest GPUs, and the throughput of all of them.
    bases: dict[str, tuple[float, float]] = {}
    for row, rate in zip(table.rows, rates, strict=True):
        if rate is None:
            continue
        series = series_of(table, row, "gpus")
        fewest, _ = bases.get(series, (math.inf, 0.0))
        if row["gpus"] < fewest:
            bases[series] = (row["gpus"], rate)
    values: list[float | None] = []
    for row, rate in zip(table.rows, rates, strict=True):
        speedup = None
        if rate is not None:
            _, base_rate = bases[series_of(table, row, "gpus")]
            speedup = rate / base_rate
        values.append(speedup)
    return values


def _throughput(row: dict[str, Any], measured: str) -> float | None:
    """Returns the throughput of all GPUs of a row; None where a value of it is no number."""
    gpus = row["gpus"]
    rate = row[measured]
    # A paper may have left a place empty, or written a word there.
    if not is_number(gpus) or not is_number(rate) or not rate:
        return None
    return float(gpus * rate)


def series_of(
    table: PublishedTable, row: dict[str, Any], over: str, measured: Sequence[str] = ()
) -> str:
    """Returns the name of the series that a row is in, over a column such as `gpus`: the values of
    all other columns that measure nothing."""
    names = []
    for name in table.columns:
        if name in (over, CONFIGURATION, table.columns[-1], *measured):
            continue
        names.append(f"{with_unit(name)} {row[name]}")
    # Its values say themselves what they are.
    if CONFIGURATION in table.columns:
        names.insert(0, str(row[CONFIGURATION]))
    return ", ".join(names)


def text_speedups(
    table: PublishedTable, tables: Iterable[PublishedTable]
) -> list[PublishedTable]:
    """Returns the tables of a file with the speedups that its text gives for a table of
    throughputs."""
    kind = table.part.removesuffix(_THROUGHPUT)
    return [each for each in tables if each.part == f"{kind}_speedup_published_text"]


def with_unit(name: str) -> str:
    """Returns the name of a column for people: time (s) for time_s, and train samples/s per GPU for
    train_samples_per_s_per_gpu."""
    for ending, unit in (("_ms", " (ms)"), ("_s", " (s)")):
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
    # Before the underscores go, by which it is found.
    name = name.replace("_per_s_", "/s_")
    name = name.replace("_", " ")
    return name.replace("gpu", "GPU")


def load(path: Path) -> list[PublishedTable]:
    """Reads the published tables of a file.

    Raises:
        UsageError: it cannot be read, or holds no table.
    """
    try:
        raw = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        # strerror: the whole error would name the path a second time.
        reason = getattr(error, "strerror", None) or error
        what = f"cannot read published tables from {str(path)!r}: {reason}"
        raise UsageError(what, _HINT) from None
    tables: list[PublishedTable] = []
    # A JSON file may as well be a list or a number.
    if isinstance(raw, dict):
        setup = raw.get("setup", {})
        if not isinstance(setup, dict):
            raise UsageError(
                f"{str(path)!r}: its setup is {shown(repr(setup))}, and no object",
                'name the settings: {"setup": {"model": "bert-base-uncased", "epochs": 3}}',
            )
        tables = _tables(path.stem, raw, setup)
    if not tables:
        raise UsageError(f"{str(path)!r} holds no published table", _HINT)
    return tables


@dataclass(frozen=True)
class _Table:
    """The shape of a table in a file."""

    columns: list[Any]
    rows: list[list[Any]]


def _tables(
    stem: str, raw: dict[str, Any], setup: dict[str, Any]
) -> list[PublishedTable]:
    """Returns the tables of a file; none, if one of them has not the shape of a table."""
    raw_tables = raw.get("tables", [raw])
    if not matches(raw_tables, list[_Table]):
        return []
    if not all(_is_complete(table) for table in raw_tables):
        return []
    footnotes = _footnotes(raw, setup)
    tables = []
    for table in raw_tables:
        # A column may be named by a number, such as one of nodes.
        columns = [str(name) for name in table["columns"]]
        rows = [dict(zip(columns, row, strict=True)) for row in table["rows"]]
        published = PublishedTable(
            file=stem,
            # Tables of one file differ in their last column, the measured one.
            part=columns[-1] if "tables" in raw else "",
            work=str(raw.get("name", stem)),
            setup=setup,
            columns=tuple(columns),
            rows=tuple(rows),
            footnotes=footnotes,
        )
        tables.append(published)
    return tables


def _is_complete(table: dict[str, Any]) -> bool:
    """Returns whether a table has columns, and every row a value for each."""
    # `matches` has checked the types; here are the lengths.
    width = len(table["columns"])
    widths_of_rows = {len(row) for row in table["rows"]}
    return width > 0 and widths_of_rows <= {width}


def _footnotes(raw: dict[str, Any], setup: dict[str, Any]) -> tuple[str, ...]:
    # Said even where it is missing: a figure without a source is not to be relied on.
    source = raw.get("source", "not named")
    footnotes = [f"source: {source}"]
    if setup:
        facts = []
        for key, value in setup.items():
            facts.append(f"{key}: {_flat(value)}")
        all_facts = "; ".join(facts)
        footnotes.append(f"setup: {all_facts}")
    if "read_off" in raw:
        read_off = raw["read_off"]
        footnotes.append(f"read off: {read_off}")
    doubts = raw.get("notes", [])
    # A single doubt may stand there without a list.
    if not isinstance(doubts, list):
        doubts = [doubts]
    footnotes += [f"doubt: {doubt}" for doubt in doubts]
    return tuple(footnotes)


def _flat(value: Any) -> str:
    """Returns a value of a setup as one line, without brackets."""
    if isinstance(value, dict):
        parts = [f"{key} {each}" for key, each in value.items()]
        return ", ".join(parts)
    if isinstance(value, list):
        return ", ".join(str(each) for each in value)
    return str(value)
