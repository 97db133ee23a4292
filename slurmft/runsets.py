"""Sets of runs that make up one table: a study, or the runs of no study.

What a study expects is read from its `study.toml`, where there is one; without it only the runs
that exist are known.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft import runs as measured_runs
from slurmft.runs import Run

STUDY_FILE, PUBLISHED_COPY = "study.toml", "published.json"
_REPEATS = 3
"""Where the study file does not say."""
SCALINGS = ("strong", "weak", "none")

Cell = dict[str, Any]
"""Field -> value of what a study varies."""


@dataclass(frozen=True, slots=True)
class RunSet:
    """The runs of one table, grouped by cell."""

    name: str
    title: str
    fields: Sequence[str]
    """What its cells differ in."""
    cells: Sequence[tuple[Cell, Sequence[Run]]]
    """Values of the fields, and the runs with them; none: they are missing."""
    repeats: int = 1
    """Runs that a cell should have, at least."""
    scaling: str | None = None
    """strong: the work is the same in all cells, weak: the same a device; None: nobody said."""
    published: Path | None = None
    """Published tables to compare with."""
    published_name: str = ""
    """The name of their file, of which `published` may be a copy."""
    problems: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        return [run for _, found in self.cells for run in found]


def group(runs: Sequence[Run], title: str = "") -> list[RunSet]:
    """The runs by study, in the order in which these began; then those of no study.

    Args:
        runs: the runs, oldest first.
        title: of the runs of no study.
    """
    studies: dict[tuple[str, Path | None], list[Run]] = {}
    others: list[Run] = []
    for run in runs:
        name = (run.study or {}).get("name")
        if isinstance(name, str) and isinstance((run.study or {}).get("cell"), dict):
            studies.setdefault((name, _study_folder(run.path)), []).append(run)
        else:
            others.append(run)
    made = [_of_study(name, folder, found) for (name, folder), found in studies.items()]
    return made + ([_of_runs(others, title)] if others else [])


def _study_folder(run: Path) -> Path | None:
    """The nearest folder above a run that has a study.toml; not above its runs' folder's."""
    return next((p for p in list(run.parents)[:3] if (p / STUDY_FILE).is_file()), None)


def _of_runs(runs: list[Run], title: str) -> RunSet:
    fields = measured_runs.varied(runs)
    cells = [({f: c[0].value(f) for f in fields}, c) for c in measured_runs.cells(runs)]
    return RunSet("runs", title or "Runs", fields, cells)


def _of_study(name: str, folder: Path | None, runs: list[Run]) -> RunSet:
    problems: list[str] = []
    raw = _read_toml(folder / STUDY_FILE, problems) if folder else {}
    cells: dict[str, tuple[Cell, list[Run]]] = {}
    for cell in [*expected_cells(raw), *((run.study or {})["cell"] for run in runs)]:
        cells.setdefault(_key(cell), (cell, []))
    for run in _newest_of_repeats(runs):
        cells[_key((run.study or {})["cell"])][1].append(run)
    fields = list(dict.fromkeys(f for cell, _ in cells.values() for f in cell))
    varied = [f for f in fields if len({repr(c.get(f)) for c, _ in cells.values()}) > 1]
    repeats = raw.get("repeats", _REPEATS if raw else 1)
    scaling = raw.get("scaling")
    if scaling is not None and scaling not in SCALINGS:
        problems.append(f"scaling {scaling!r} of study {name} is none of {', '.join(SCALINGS)}")
        scaling = None
    return RunSet(
        name=name,
        title=str(raw.get("title") or name),
        fields=varied,
        cells=list(cells.values()),
        repeats=repeats if isinstance(repeats, int) else 1,
        scaling=scaling,
        published=_published(raw.get("published"), folder, runs, problems),
        published_name=Path(str(raw.get("published", ""))).stem,
        problems=problems,
    )


def _read_toml(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {str(path)!r}, missing runs are not known: {error}")
        return {}


def expected_cells(raw: dict[str, Any]) -> list[Cell]:
    """The cells of a study file: its listed cells, each with every point of its grid."""
    grid, listed = raw.get("grid", {}), raw.get("cells", [])
    if not isinstance(grid, dict) or not isinstance(listed, list) or not (grid or listed):
        return []
    axes = [v if isinstance(v, list) else [v] for v in grid.values()]
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*axes)]
    return [cell | point for cell in (listed or [{}]) if isinstance(cell, dict) for point in points]


def _key(cell: Cell) -> str:
    """What tells cells apart, as JSON and TOML have them: 1 is 1.0, the order does not count."""
    plain = {k: float(v) if type(v) is int else v for k, v in cell.items()}
    return json.dumps(plain, sort_keys=True, default=str)


def _newest_of_repeats(runs: Iterable[Run]) -> list[Run]:
    """One run of each repeat of a cell: one that finished, or the last one begun."""
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        study = run.study or {}
        key = (_key(study["cell"]), repr(study.get("repeat", run.name)))
        if key not in found or run.is_finished or not found[key].is_finished:
            found[key] = run
    return list(found.values())


def _published(
    given: Any, folder: Path | None, runs: Sequence[Run], problems: list[str]
) -> Path | None:
    """The published tables that a study names: their copy in its folder; else by that folder, or
    by where it was submitted."""
    if not isinstance(given, str) or folder is None:
        return None
    from_folders = dict.fromkeys(r.config.get("submission", {}).get("folder", "") for r in runs)
    starts = [folder, *(Path(str(start)) for start in from_folders), Path()]
    candidates = [folder / PUBLISHED_COPY, *(start / given for start in starts)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        problems.append(f"published {given!r} of the study is no file: give --published FILE")
    return found
