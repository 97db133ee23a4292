"""How a study stands: which runs of its cells there are, and what became of them.

Nothing is kept of it: run directories say to which cell they belong, and at most two calls of
Slurm's commands say how all their jobs stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.cluster.status import Standing, stand
from slurmft.core.text import aligned, shown
from slurmft.runs import records, scan
from slurmft.runs.scan import MeasuredRun
from slurmft.studies import spec
from slurmft.studies.spec import Cell, Study

STATES = ("finished", "running", "pending", "failed", "missing")
"""Of a repeat; the first one that a try of it has."""


@dataclass(slots=True)
class Repeat:
    """One repeat of a cell, with all its tries, oldest first."""

    cell: Cell
    number: int
    tries: list[Standing] = field(default_factory=list)

    @property
    def best(self) -> Standing | None:
        """The try that counts: the one that got furthest; of several, the last."""
        return min(reversed(self.tries), key=lambda t: STATES.index(t.outcome), default=None)

    @property
    def state(self) -> str:
        return self.best.outcome if self.best else "missing"

    @property
    def failures(self) -> int:
        """Tries that failed; one that was cancelled before it started was none."""
        return sum(t.outcome == "failed" and t.has_started for t in self.tries)


@dataclass(frozen=True, slots=True)
class Tally:
    """All repeats of a study, and what else lies in its folder."""

    repeats: list[Repeat]
    others: list[MeasuredRun]
    """Runs of cells that the study file does not have, or of another study."""
    problems: list[str]
    """A line for every directory that could not be read."""
    others_alive: list[Standing]
    """Those of the others that wait or run: they disturb measurements, too."""

    def by_cell(self) -> list[tuple[Cell, list[Repeat]]]:
        """Every cell with its repeats, in the order of the study file."""
        groups: dict[str, tuple[Cell, list[Repeat]]] = {}
        for repeat in self.repeats:
            key = spec.key_of(repeat.cell)
            groups.setdefault(key, (repeat.cell, []))[1].append(repeat)
        return list(groups.values())

    def tries(self) -> list[Standing]:
        return [t for r in self.repeats for t in r.tries]

    def alive(self) -> list[Standing]:
        """All whose jobs wait or run here, of this study file or not; one elsewhere disturbs nobody
        here, and no job of here can wait for its end."""
        every = (*self.tries(), *self.others_alive)
        return [t for t in every if t.is_alive and t.job and not t.apart]

    def count(self, state: str) -> int:
        return sum(r.state == state for r in self.repeats)


def take(study: Study, folder: Path) -> Tally:
    """Looks at the runs in a study's folder, and asks how their jobs stand."""
    found, problems = find(folder)
    repeats = {(spec.key_of(c), n): Repeat(c, n) for n, c in spec.rounds(study)}
    belongs: dict[tuple[str, int], list[MeasuredRun]] = {}
    others: list[MeasuredRun] = []
    for run in found:
        key = _key(run, study.name)
        if key in repeats:
            belongs.setdefault(key, []).append(run)
        else:
            others.append(run)
    tries = {t.run.path: t for t in stand(found)}
    for key, group in belongs.items():
        repeats[key].tries = [tries[run.path] for run in group]
    others_alive = [t for run in others if (t := tries[run.path]).is_alive]
    return Tally(list(repeats.values()), others, problems, others_alive)


def find(folder: Path) -> tuple[list[MeasuredRun], list[str]]:
    """The runs in a study's folder, and what could not be read."""
    top = folder / "runs"
    return scan.find([top], may_be_none=True) if top.is_dir() else ([], [])


def _key(run: MeasuredRun, name: str) -> tuple[str, int] | None:
    """Cell and repeat of a run; None: it is of no study, or of another."""
    told = run.study
    if not isinstance(told, dict) or told.get("name") != name:
        return None
    if not isinstance(told.get("cell"), dict) or not isinstance(told.get("repeat"), int):
        return None
    return spec.key_of(told["cell"]), told["repeat"]


# --- for people and programs ----------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of equal width; the first row is their heads."""
    return "\n".join(aligned(rows))


def status_table(study: Study, tally: Tally) -> str:
    """A line for every cell: how many of its repeats stand how, and why."""
    rows = [[*study.varied, *STATES, ""]]
    for cell, repeats in tally.by_cell():
        counts = [sum(r.state == state for r in repeats) for state in STATES]
        values = [str(value) for value in cell.values()]
        rows.append([*values, *(str(n or "-") for n in counts), _note(repeats)])
    return table(rows)


def _note(repeats: list[Repeat]) -> str:
    """What is most worth knowing of a cell: its failure, what it waits for, how far it is."""
    for state in ("failed", "running", "pending"):
        for repeat in repeats:
            best = repeat.best
            if best is None or best.outcome != state:
                continue
            if state == "running" and (steps := records.read(best.run.path).steps):
                return f"step {steps[0]}/{steps[1]}"
            if best.reason:
                return shown(best.reason)
    return ""


def as_json(study: Study, folder: Path, tally: Tally) -> dict[str, Any]:
    """All that `slurmft study status` knows."""
    return {
        "name": study.name,
        "title": study.title,
        "folder": str(folder),
        "totals": {state: tally.count(state) for state in STATES},
        "repeats": [_repeat_json(repeat) for repeat in tally.repeats],
        "other_runs": [str(run.path) for run in tally.others],
        "problems": tally.problems,
    }


def _repeat_json(repeat: Repeat) -> dict[str, Any]:
    best = repeat.best
    steps = records.read(best.run.path).steps if best and best.state == "running" else None
    return {
        "cell": repeat.cell,
        "repeat": repeat.number,
        "state": repeat.state,
        "reason": best.reason if best else "",
        "run": str(best.run.path) if best else None,
        "job": best.job if best else None,
        "steps": steps and {"done": steps[0], "total": steps[1]},
        "tries": [str(t.run.path) for t in repeat.tries],
    }
