"""Sets of runs that make up one table: a study, or all runs that belong to no study.

The cells and repeats of a study are read from its `study.toml`; without it, only the existing runs
are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.runs import scan
from slurmft.runs.scan import MeasuredRun
from slurmft.studies import spec
from slurmft.studies.spec import GLOBAL_BATCH_SIZE, Cell, Study


@dataclass(frozen=True, slots=True)
class RunSet:
    """The runs of one table, grouped by cell."""

    name: str
    title: str
    fields: Sequence[str]
    """What its cells differ in."""
    cells: Sequence[tuple[Cell, Sequence[MeasuredRun]]]
    """Values of the fields, and the runs with them; no run: they are missing."""
    repeats: int = 1
    """Runs that a cell should have, at least."""
    scaling: str | None = None
    """strong: the same work in all cells; weak: the same work per device; None: unknown."""
    study: Study | None = None
    """Its study file, if it can be read."""
    problems: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[MeasuredRun]:
        return [run for _, found in self.cells for run in found]

    @property
    def is_own(self) -> bool:
        """Whether its runs are of a program of the user's own."""
        return any(run.is_own for run in self.runs)


def group_by_study(runs: Sequence[MeasuredRun], title: str = "") -> list[RunSet]:
    """The runs by study, oldest study first; then those of no study.

    Args:
        runs: the runs, oldest first.
        title: of the runs of no study, which are a set for each program.
    """
    studies: dict[tuple[str, Path | None], list[MeasuredRun]] = {}
    others: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        name = (run.study or {}).get("name")
        if isinstance(name, str) and isinstance((run.study or {}).get("cell"), dict):
            studies.setdefault((name, _study_folder(run.path)), []).append(run)
        else:
            kind = str(run.config["program"].get("name")) if run.is_own else ""
            others.setdefault(kind, []).append(run)
    made = [_of_study(name, folder, found) for (name, folder), found in studies.items()]
    for kind, found in others.items():
        words = f"{title or 'Runs'}: {kind}" if len(others) > 1 and kind else title
        made.append(_of_runs(found, words))
    return made


def _study_folder(run: Path) -> Path | None:
    """The nearest folder above a run that has a study.toml; not above its runs' folder's."""
    return next((p for p in list(run.parents)[:3] if (p / spec.FILE).is_file()), None)


def _of_runs(runs: list[MeasuredRun], title: str) -> RunSet:
    fields = scan.varied(runs)
    cells = [({f: c[0].fields.get(f) for f in fields}, c) for c in scan.cells(runs)]
    return RunSet("runs", title or "Runs", fields, cells)


def _of_study(name: str, folder: Path | None, runs: list[MeasuredRun]) -> RunSet:
    problems: list[str] = []
    study = _read_study(name, folder, problems) if folder else None
    cells: dict[str, tuple[Cell, list[MeasuredRun]]] = {}
    for cell in [*(study.cells if study else ()), *((run.study or {})["cell"] for run in runs)]:
        cells.setdefault(spec.key_of(cell), (cell, []))
    for run in _newest_of_repeats(runs):
        cells[spec.key_of((run.study or {})["cell"])][1].append(run)
    fields = list(dict.fromkeys(f for cell, _ in cells.values() for f in cell))
    varied = [f for f in fields if len({repr(c.get(f)) for c, _ in cells.values()}) > 1]
    return RunSet(
        name=name,
        title=study.title if study else name,
        fields=varied,
        cells=list(cells.values()),
        repeats=study.repeats if study else 1,
        scaling=study.scaling if study else None,
        study=study,
        problems=problems,
    )


def _read_study(name: str, folder: Path, problems: list[str]) -> Study | None:
    """The study file in a folder; None, with a problem noted, if it cannot be used."""
    try:
        study = spec.read_study(folder, with_published=False)
    except UsageError as error:
        problems.append(f"missing runs are unknown: {error.message}")
        return None
    if study.name != name:
        path = folder / spec.FILE
        problems.append(f"missing runs are unknown: {path} is of the study {study.name!r}")
        return None
    return study


def planned(study: Study, cell: Cell, common: Mapping[str, Any]) -> Cell:
    """The fields that a run of a cell would have, as far as they are known.

    Args:
        study: the study.
        cell: one of its cells.
        common: fields that are the same in all existing runs: the study file lacks flags.
    """
    values = study.fixed | spec.typed(cell)
    found = {k: v for k, v in {**common, **values}.items() if v is not None}
    if GLOBAL_BATCH_SIZE in values:
        found.pop("batch_size", None)  # it is for other numbers of processes
        with contextlib.suppress(UsageError):  # the number of processes is not known
            found["batch_size"] = spec.divide_batch(values, found)["batch_size"]
    return found


def _newest_of_repeats(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """One run of each repeat of a cell: a finished one, or the newest."""
    found: dict[tuple[str, str], MeasuredRun] = {}
    for run in runs:
        study = run.study or {}
        key = (spec.key_of(study["cell"]), repr(study.get("repeat", run.name)))
        if key not in found or run.is_finished or not found[key].is_finished:
            found[key] = run
    return list(found.values())
