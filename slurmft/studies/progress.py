"""The status of a study's runs: which there are of its cells, and what became of them.

Nothing is stored: run directories say to which cell they belong, and at most two calls of Slurm's
commands give the states of all their jobs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.cluster.status import RunStatus, run_statuses
from slurmft.runs import records, scan
from slurmft.runs.scan import MeasuredRun
from slurmft.studies import spec
from slurmft.studies.spec import Cell, Study

STATES = ("finished", "running", "pending", "failed", "missing")
"""States of a repeat: the first of these that one of its tries has."""


@dataclass(slots=True)
class Repeat:
    """One repeat of a cell, with all its tries, oldest first."""

    cell: Cell
    number: int
    tries: list[RunStatus] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """What identifies it within its study: cell and number."""
        return spec.key_of(self.cell), self.number

    @property
    def best(self) -> RunStatus | None:
        """The try that got furthest; of several, the last."""
        return min(reversed(self.tries), key=lambda t: STATES.index(t.outcome), default=None)

    @property
    def state(self) -> str:
        return self.best.outcome if self.best else "missing"

    @property
    def failures(self) -> int:
        """Tries that failed; one that was cancelled before it started does not count."""
        return sum(t.outcome == "failed" and t.has_started for t in self.tries)


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """The status of a study's runs, and what else is in its folder."""

    repeats: list[Repeat]
    others: list[RunStatus]
    """Runs of cells that the study file does not have, or of another study. Those that wait or run
    disturb measurements as well."""
    problems: list[str]
    """A line for every directory that could not be read."""

    def by_cell(self) -> list[tuple[Cell, list[Repeat]]]:
        """Every cell with its repeats, in the order of the study file."""
        groups: dict[str, tuple[Cell, list[Repeat]]] = {}
        for repeat in self.repeats:
            groups.setdefault(repeat.key[0], (repeat.cell, []))[1].append(repeat)
        return list(groups.values())

    def tries(self) -> list[RunStatus]:
        return [t for r in self.repeats for t in r.tries]

    def alive(self) -> list[RunStatus]:
        """All whose jobs wait or run on this cluster, of this study file or not. Those elsewhere
        disturb nothing here, and no job here can wait for their end."""
        every = (*self.tries(), *self.others)
        return [t for t in every if t.is_alive and t.job and not t.elsewhere]

    def count(self, state: str) -> int:
        return sum(r.state == state for r in self.repeats)


def study_status(study: Study, folder: Path) -> StudyStatus:
    """Reads the runs in a study's folder, and asks for the states of their jobs."""
    runs, problems = find_runs(folder)
    statuses = run_statuses(runs)
    repeats = {(spec.key_of(c), n): Repeat(c, n) for n, c in spec.rounds(study)}
    others: list[RunStatus] = []
    for status in statuses:
        repeat = repeats.get(_key(status.run, study.name))
        (repeat.tries if repeat else others).append(status)
    return StudyStatus(list(repeats.values()), others, problems)


def find_runs(folder: Path) -> tuple[list[MeasuredRun], list[str]]:
    """The runs in a study's folder, oldest first, and what could not be read."""
    top = folder / "runs"
    return scan.find([top], may_be_none=True) if top.is_dir() else ([], [])


def _key(run: MeasuredRun, name: str) -> tuple[str, int]:
    """Cell and repeat of a run; ("", 0): it belongs to no study, or to another."""
    found = run.study or {}
    cell, repeat = found.get("cell"), found.get("repeat")
    if found.get("name") != name or not isinstance(cell, dict) or not isinstance(repeat, int):
        return "", 0
    return spec.key_of(cell), repeat


def last_step(repeat: Repeat) -> tuple[int, int] | None:
    """Optimizer steps of a running repeat, done and in all; None where they are unknown."""
    best = repeat.best
    return records.read(best.run.path).steps if best and best.outcome == "running" else None


def status_json(study: Study, folder: Path, status: StudyStatus) -> dict[str, Any]:
    """What `slurmft study status --json` prints."""
    return {
        "name": study.name,
        "title": study.title,
        "folder": str(folder),
        "totals": {state: status.count(state) for state in STATES},
        "repeats": [_repeat_json(repeat) for repeat in status.repeats],
        "other_runs": [str(other.run.path) for other in status.others],
        "problems": status.problems,
    }


def _repeat_json(repeat: Repeat) -> dict[str, Any]:
    best, steps = repeat.best, last_step(repeat)
    return {
        "cell": repeat.cell,
        "repeat": repeat.number,
        "state": repeat.state,
        "reason": best.reason if best else "",
        "run": str(best.run.path) if best else None,
        "job": best.job if best else None,
        "metrics": best.run.result["metrics"] if best and best.run.result else None,
        "steps": steps and {"done": steps[0], "total": steps[1]},
        "tries": [str(t.run.path) for t in repeat.tries],
    }
