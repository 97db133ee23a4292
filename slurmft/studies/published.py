"""Published tables, as files in the form of `results/published` hold them.

Such a file has either `columns` and `rows`, or, as read from charts, arrays by configuration over
`gpus`. Both are read into one form; no value is changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.files import is_number

CONFIGURATION = "configuration"
"""Column of a chart's bars that are named PRECISION-BATCHSIZE."""

_HINT = "it must have columns and rows, or arrays over gpus, as the files in results/published"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table: a row for every measurement. A file of charts has one for each chart."""

    file: str
    """The file's name without ending."""
    part: str
    """The array of the file, if it has several; else empty."""
    work: str
    """What was measured in all tables of the file."""
    name: str
    """The same, with the array."""
    source: str
    notes: tuple[str, ...]
    setup: dict[str, Any]
    """What was the same in all rows: model, precision, epochs, ..."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def key(self) -> str:
        """For file names."""
        return "-".join(filter(None, (self.file, self.part)))

    def named(self, row: Sequence[Any]) -> dict[str, Any]:
        """A row with the names of its columns."""
        return dict(zip(self.columns, row, strict=True))

    def column(self, name: str) -> list[Any]:
        """The values of a column."""
        return [row[self.columns.index(name)] for row in self.rows]

    @property
    def footnotes(self) -> tuple[str, ...]:
        """Source, setup, doubts."""
        setup = "; ".join(f"{k}: {_flat(v)}" for k, v in self.setup.items())
        return (f"source: {self.source}", *([f"setup: {setup}"] if setup else []), *self.notes)


def with_unit(name: str) -> str:
    """time_s -> time (s), train_samples_per_s_per_gpu -> train samples/s per GPU"""
    for ending, unit in (("_ms", " (ms)"), ("_s", " (s)")):
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
    return name.replace("_per_s_", "/s_").replace("_", " ").replace("gpu", "GPU")


def load(path: Path, name: str = "") -> list[PublishedTable]:
    """The published tables of a file; `name`: of the original, if it is a copy.

    Raises:
        UsageError: it cannot be read, or holds no published table.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read published tables from {str(path)!r}: {reason}", _HINT
        ) from None
    tables = _tables(name or path.stem, raw) if isinstance(raw, dict) else []
    if not tables:
        raise UsageError(f"{str(path)!r} holds no published table", _HINT)
    return tables


def _tables(stem: str, raw: dict[str, Any]) -> list[PublishedTable]:
    read_off = [f"read off: {raw['read_off']}"] if "read_off" in raw else []
    notes = raw.get("notes", [])
    notes = [f"doubt: {note}" for note in (notes if isinstance(notes, list) else [notes])]
    setup = raw.get("setup", {})
    name = str(raw.get("name", stem))
    common: dict[str, Any] = {
        "file": stem,
        "work": name,
        "source": str(raw.get("source", "not named")),
        "notes": (*read_off, *notes),
        "setup": setup if isinstance(setup, dict) else {},
    }
    if "columns" in raw:
        plain = _plain(raw.get("columns"), raw.get("rows"))
        if plain is None:
            return []
        return [PublishedTable(part="", name=name, columns=plain[0], rows=plain[1], **common)]
    devices = raw.get("gpus")
    if not isinstance(devices, list) or not all(map(is_number, devices)):
        return []
    found = []
    for key, values in raw.items():
        chart = _chart(key, values, devices) if key not in ("gpus", "setup") else None
        if chart:
            title = f"{name}: {with_unit(key)}"
            found.append(
                PublishedTable(part=key, name=title, columns=chart[0], rows=chart[1], **common)
            )
    return found


_Parts = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]


def _plain(columns: Any, rows: Any) -> _Parts | None:
    """Names of columns, and rows; None: the file has other values there."""
    if not isinstance(columns, list) or not isinstance(rows, list) or not columns:
        return None
    if not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        return None
    return tuple(map(str, columns)), tuple(map(tuple, rows))


def _chart(key: str, values: Any, devices: list[Any]) -> _Parts | None:
    """The bars of a chart as rows: configuration, gpus, value; None: it is not a chart."""
    if isinstance(values, list) and len(values) == len(devices):
        return ("gpus", key), tuple(zip(devices, values, strict=True))
    if not isinstance(values, dict) or not values:
        return None
    rows: list[tuple[Any, ...]] = []
    for name, bars in values.items():
        label = int(name) if name.isdecimal() else name
        if isinstance(bars, list) and len(bars) == len(devices):
            rows += [(label, n, bar) for n, bar in zip(devices, bars, strict=True)]
        elif isinstance(bars, dict) and all(n.isdecimal() for n in bars):
            rows += [(label, int(n), bar) for n, bar in bars.items()]
        else:
            return None
    sizes = all(isinstance(row[0], int) for row in rows)
    return ("eval_batch_size" if sizes else CONFIGURATION, "gpus", key), tuple(rows)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
