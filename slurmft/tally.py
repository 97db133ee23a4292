"""How a study stands: which runs of its cells there are, and what became of them.

Nothing is kept of it: run directories say to which cell they belong, and at most two calls of
Slurm's commands say how all their jobs stand.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft import grid, launchers, runs, slurm
from slurmft.cli import aligned
from slurmft.grid import Cell, Study
from slurmft.rundir import RunDir, read_json
from slurmft.runs import Run
from slurmft.slurm import JobState

STATES = ("finished", "running", "pending", "failed", "missing")
"""Of a repeat; the first one that a try of it has."""

_REQUEUED = ("PREEMPTED", "NODE_FAIL", "REQUEUED")
"""What the controller calls a job for a moment before it queues it again."""

_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Try:
    """One run of a repeat of a cell."""

    run: Run
    state: str
    """finished, running, pending or failed."""
    reason: str = ""
    has_started: bool = True

    @property
    def is_alive(self) -> bool:
        return self.state in ("running", "pending")


@dataclass(slots=True)
class Repeat:
    """One repeat of a cell, with all its tries, oldest first."""

    cell: Cell
    number: int
    tries: list[Try] = field(default_factory=list)

    @property
    def best(self) -> Try | None:
        """The try that counts: the one that got furthest; of several, the last."""
        return min(reversed(self.tries), key=lambda t: STATES.index(t.state), default=None)

    @property
    def state(self) -> str:
        return self.best.state if self.best else "missing"

    @property
    def failures(self) -> int:
        """Tries that failed; one that was cancelled before it started was none."""
        return sum(t.state == "failed" and t.has_started for t in self.tries)


@dataclass(frozen=True, slots=True)
class Tally:
    """All repeats of a study, and what else lies in its folder."""

    repeats: list[Repeat]
    others: list[Run]
    """Runs of cells that the study file does not have, or of another study."""
    problems: list[str]
    """A line for every directory that could not be read."""
    others_alive: list[Try]
    """Those of the others that wait or run: they disturb measurements, too."""

    def by_cell(self) -> list[tuple[Cell, list[Repeat]]]:
        """Every cell with its repeats, in the order of the study file."""
        groups: dict[str, tuple[Cell, list[Repeat]]] = {}
        for repeat in self.repeats:
            key = grid.key_of(repeat.cell)
            groups.setdefault(key, (repeat.cell, []))[1].append(repeat)
        return list(groups.values())

    def tries(self) -> list[Try]:
        return [t for r in self.repeats for t in r.tries]

    def alive(self) -> list[Try]:
        """All whose jobs wait or run, of this study file or not."""
        every = (*self.tries(), *self.others_alive)
        return [t for t in every if t.is_alive and job_of(t.run)[1]]

    def count(self, state: str) -> int:
        return sum(r.state == state for r in self.repeats)


def take(study: Study, folder: Path) -> Tally:
    """Looks at the runs in a study's folder, and asks how their jobs stand."""
    found, problems = find(folder)
    repeats = {(grid.key_of(c), n): Repeat(c, n) for n, c in grid.rounds(study)}
    belongs: dict[tuple[str, int], list[Run]] = {}
    others: list[Run] = []
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


def find(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs in a study's folder, and what could not be read."""
    top = folder / "runs"
    return runs.find([top], may_be_none=True) if top.is_dir() else ([], [])


def _key(run: Run, name: str) -> tuple[str, int] | None:
    """Cell and repeat of a run; None: it is of no study, or of another."""
    told = run.study
    if not isinstance(told, dict) or told.get("name") != name:
        return None
    if not isinstance(told.get("cell"), dict) or not isinstance(told.get("repeat"), int):
        return None
    return grid.key_of(told["cell"]), told["repeat"]


# --- how runs stand -------------------------------------------------------------------------------


def stand(found: Iterable[Run]) -> list[Try]:
    """How runs stand, by their own records and, where these do not say the end, their jobs'."""
    every = list(found)
    jobs = {run.path: job_of(run) for run in every if not run.is_finished}
    on_slurm = [job for cluster, job in jobs.values() if cluster == "slurm" and job]
    states = slurm.job_states(on_slurm)
    return [_try(run, *jobs.get(run.path, ("", "")), states) for run in every]


def job_of(run: Run) -> tuple[str, str]:
    """Cluster and job id of a run; "" for one whose submission was cut off."""
    files = RunDir(run.path)
    job = read_json(files.job) or {}
    told = job.get("id") or (read_json(files.attempt) or {}).get("job", "")
    return job.get("cluster") or run.config["job"].get("cluster", ""), str(told)


def _try(run: Run, cluster: str, job: str, states: dict[str, JobState]) -> Try:
    started = RunDir(run.path).attempt.exists()
    if run.is_finished:
        return Try(run, "finished")
    if not job and not run.has_ended:
        return Try(run, "pending", "not submitted yet", started)
    state = states.get(job) if cluster == "slurm" else _local_state(run, cluster, job)
    if state is not None and _will_go_on(run, state):
        word = "pending" if state.name in ("PENDING", *_REQUEUED) else "running"
        return Try(run, word, state.reason if word == "pending" else "", started)
    if state is not None and state.name == "UNKNOWN" and not run.has_ended:
        word = "running" if run.state["state"] in ("running", "stopping") else "pending"
        return Try(run, word, "Slurm gives no answer", started)
    return _ended(run, state, started)


def _local_state(run: Run, cluster: str, job: str) -> JobState | None:
    if run.has_ended or cluster not in ("local", "mpirun"):
        return None
    return launchers.get(cluster).job_state(job, RunDir(run.path))


def _will_go_on(run: Run, state: JobState) -> bool:
    """Whether a job waits or runs. A run that says that it has ended is right, unless Slurm has
    queued it again: its job may just be ending."""
    if state.name == "UNKNOWN":
        return False
    if run.has_ended:
        return state.name == "PENDING"
    return not state.ended or (state.name in _REQUEUED and bool(run.value("requeue")))


def _ended(run: Run, state: JobState | None, started: bool) -> Try:
    """A run that is over; its last words may be newer than what was read of it."""
    run = dataclasses.replace(
        run,
        state=read_json(RunDir(run.path).state) or run.state,
        result=read_json(RunDir(run.path).result) or run.result,
    )
    if run.is_finished:
        return Try(run, "finished")
    if run.state["state"] == "cancelled":
        started = started or RunDir(run.path).attempt.exists()
        return Try(run, "failed", "cancelled", started)
    # A setup line may fail before anything of ours starts: that is a try, too.
    if run.has_ended:
        return Try(run, "failed", run.state.get("reason") or "failed")
    if state is None:
        return Try(run, "failed", "vanished: neither queue nor accounting knows its job")
    words = f"{state.name.lower()} {state.reason}".strip()
    return Try(run, "failed", words, started or state.name != "CANCELLED")


def progress(run: Run) -> tuple[int, int] | None:
    """Optimizer steps done and in all, by the end of a run's records; None: not known yet."""
    try:
        with open(RunDir(run.path).records, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"total_steps"' not in line:
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            return int(record.get("step", 0)), int(record["total_steps"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the line that the tail begins within, or half a last one
    return None


# --- for people and programs ----------------------------------------------------------------------


def shown(text: str, width: int = 60) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


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
            if best is None or best.state != state:
                continue
            if state == "running" and (steps := progress(best.run)):
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
    steps = progress(best.run) if best and best.state == "running" else None
    return {
        "cell": repeat.cell,
        "repeat": repeat.number,
        "state": repeat.state,
        "reason": best.reason if best else "",
        "run": str(best.run.path) if best else None,
        "job": job_of(best.run)[1] if best else None,
        "steps": steps and {"done": steps[0], "total": steps[1]},
        "tries": [str(t.run.path) for t in repeat.tries],
    }
