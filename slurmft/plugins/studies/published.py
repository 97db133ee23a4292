"""Published tables, as files in the form of `results/published` hold them.

Such a file has `columns` and `rows`, or several `tables` that have them. No value is changed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.decode import matches
from slurmft.core.errors import UsageError

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
        """For file names."""
        return "-".join(filter(None, (self.file, self.part)))

    @property
    def name(self) -> str:
        return f"{self.work}: {with_unit(self.part)}" if self.part else self.work


def with_unit(name: str) -> str:
    """time_s -> time (s), train_samples_per_s_per_gpu -> train samples/s per GPU"""
    for ending, unit in (("_ms", " (ms)"), ("_s", " (s)")):
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
    return name.replace("_per_s_", "/s_").replace("_", " ").replace("gpu", "GPU")


def load(path: Path) -> list[PublishedTable]:
    """The published tables of a file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        what = f"cannot read published tables from {str(path)!r}: {reason}"
        raise UsageError(what, _HINT) from None
    tables = _tables(path.stem, raw) if isinstance(raw, dict) else []
    if not tables:
        raise UsageError(f"{str(path)!r} holds no published table", _HINT)
    return tables


@dataclass(frozen=True)
class _Table:
    columns: list[Any]
    rows: list[list[Any]]


def _tables(stem: str, raw: dict[str, Any]) -> list[PublishedTable]:
    """The tables of a file; none: it has other values there."""
    given, notes, setup = raw.get("tables", [raw]), raw.get("notes", []), raw.get("setup", {})
    if not matches(given, list[_Table]):
        return []
    if any(not t["columns"] or {len(r) for r in t["rows"]} - {len(t["columns"])} for t in given):
        return []
    setup = setup if isinstance(setup, dict) else {}
    words = "; ".join(f"{k}: {_flat(v)}" for k, v in setup.items())
    footnotes = (
        f"source: {raw.get('source', 'not named')}",
        *([f"setup: {words}"] if words else []),
        *([f"read off: {raw['read_off']}"] if "read_off" in raw else []),
        *(f"doubt: {note}" for note in (notes if isinstance(notes, list) else [notes])),
    )
    return [
        PublishedTable(
            file=stem,
            part=str(table["columns"][-1]) if "tables" in raw else "",
            work=str(raw.get("name", stem)),
            setup=setup,
            columns=tuple(map(str, table["columns"])),
            rows=tuple(
                dict(zip(map(str, table["columns"]), row, strict=True)) for row in table["rows"]
            ),
            footnotes=footnotes,
        )
        for table in given
    ]


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
