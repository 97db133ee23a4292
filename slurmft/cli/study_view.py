"""What `slurmft study` prints: tables of cells, warnings, dry runs, and what to type next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.cluster.slurm import job_array
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.core.text import aligned, shown
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.studies import runner, spec
from slurmft.studies.progress import STATES, Repeat, StudyStatus, last_step
from slurmft.studies.report.measures import measures_of, rows_of
from slurmft.studies.report.runset import group_by_study
from slurmft.studies.runner import Submission
from slurmft.studies.spec import Study

# --- cells ----------------------------------------------------------------------------------------


def status_table(study: Study, status: StudyStatus) -> str:
    """A line for every cell: its repeats by state, and a note."""
    results = _results(status) if study.program else {}
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    rows = [[*study.varied, *STATES, *names, ""]]
    for cell, repeats in status.by_cell():
        counts = Counter(r.state for r in repeats)
        numbers = [str(counts[state] or "-") for state in STATES]
        numbers += [results.get(repeats[0].key[0], {}).get(name, "-") for name in names]
        rows.append([*map(str, cell.values()), *numbers, _note(repeats)])
    return "\n".join(aligned(rows))


def _results(status: StudyStatus) -> dict[str, dict[str, str]]:
    """Key of a cell -> the medians of what its finished repeats measured, by name."""
    finished = [r.best.run for r in status.repeats if r.best and r.state == "finished"]
    found = {}
    for runset in group_by_study(finished):
        labels = {measure.key: measure.label for measure in measures_of(runset)}
        for row in rows_of(runset):
            medians = {labels[key]: f"{s.median:.5g}" for key, s in row.measures.items()}
            found[spec.key_of(row.cell)] = medians
    return found


def _note(repeats: list[Repeat]) -> str:
    """Why a repeat of a cell failed, else how far one is, else what one waits for."""
    for state in ("failed", "running", "pending"):
        for repeat in repeats:
            if repeat.best is None or repeat.state != state:
                continue
            if steps := last_step(repeat):
                return f"step {steps[0]}/{steps[1]}"
            if repeat.best.reason:
                return shown(repeat.best.reason)
    return ""


def repeats_table(
    todo: Submission, jobs: Mapping[tuple[str, int], str], word: str = "submitted"
) -> str:
    """A line for every cell: the states of its repeats.

    Args:
        todo: the submission.
        jobs: key of a repeat that was submitted -> its job; "" if it has none yet.
        word: the state of those.
    """
    rows = [[*todo.study.varied, "repeats"]]
    for cell, repeats in todo.status.by_cell():
        states = Counter(word if r.key in jobs else _state(todo, r) for r in repeats)
        ids = ", ".join(filter(None, (jobs.get(r.key) for r in repeats)))
        text = ", ".join(f"{count} {state}" for state, count in states.items())
        rows.append([*map(str, cell.values()), text + (f" ({ids})" if ids else "")])
    return "\n".join(aligned(rows))


def _state(todo: Submission, repeat: Repeat) -> str:
    return "given up" if todo.given_up(repeat) else repeat.state


def warnings(status: StudyStatus) -> list[str]:
    """What is in the folder and does not count."""
    lines = [f"warning: {problem}; left out" for problem in status.problems]
    groups: dict[str, list[MeasuredRun]] = {}
    for run in (other.run for other in status.others):
        found = run.study or {}
        cell = found.get("cell")
        words = spec.label(cell) if isinstance(cell, dict) else "no cell"
        groups.setdefault(f"{words}, repeat {found.get('repeat', '-')}", []).append(run)
    for words, runs in groups.items():
        lines.append(
            f"warning: {len(runs)} run(s) that the study does not have ({words}), such as "
            f"{runs[0].path}; left out"
        )
    return lines


def given_up_text(repeat: Repeat, study: Study) -> str:
    assert repeat.best is not None
    return (
        f"given up after {repeat.failures} failed run(s): {spec.label(repeat.cell)}, repeat "
        f"{repeat.number}: {shown(repeat.best.reason)}\n"
        f"  look into {repeat.best.run.path}, or raise retries = {study.retries} in the study file"
    )


# --- a dry run ------------------------------------------------------------------------------------


def dry_run(todo: Submission) -> str:
    """What would be submitted."""
    due = todo.due()
    lines = [f"# {todo.study.title}: {len(todo.study.cells)} cells x {todo.study.repeats} repeats"]
    table = repeats_table(todo, {repeat.key: "" for repeat in due}, "to submit")
    lines += [*warnings(todo.status), table, ""]
    if due and todo.cluster == "slurm":
        lines += _dry_arrays(todo, due)
    elif due:
        lines += [f"# one after another, {todo.cluster}: {len(due)} run(s)"]
    return "\n".join([*lines, "", f"study folder: {todo.folder}", "dry run: nothing was submitted"])


def _dry_arrays(todo: Submission, due: Sequence[Repeat]) -> list[str]:
    """A line for every array, and the scripts of the first one."""
    groups, lines = runner.by_request(todo, due), []
    at_most, folder = todo.study.at_most, todo.folder / "arrays"
    first_after = after = runner.live_jobs(todo.status.alive())
    for number, group in enumerate(groups, start=1):
        waits = f", after {', '.join(after)}" if after else ""
        cells = "; ".join(spec.label(r.cell) for r in group)
        lines.append(
            f"# array {number}: repeat {group[0].number}, {len(group)} run(s), at most "
            f"{at_most} at a time{waits}: {shown(cells, 100)}"
        )
        after = [f"array {number}"]
    config = todo.configs[groups[0][0].key]
    runs = [
        RunDir(Path(config.job.runs_dir) / f"{config.program.name}-<time>-c{n}-r1-<random>")
        for n in range(1, len(groups[0]) + 1)
    ]
    options = job_array.array_options(config, len(runs), at_most, first_after, folder)
    lines += ["", "# sbatch script of array 1", job_array.script_text(options, runs)]
    return [*lines, "# script of its first run", inside_text(config, runs[0], job_array.JOB)]


# --- what to type next ----------------------------------------------------------------------------


def next_commands(todo: Submission, status: StudyStatus) -> str:
    """The commands that a user types after `study run`."""
    folder = shlex.quote(str(todo.folder))
    again = shlex.join(["python", "-m", "slurmft", "study", "run", *todo.argv])
    report = f"  {_report_command(todo.folder)}   # tables, plots, a page"
    finished = status.count("finished")
    if finished == len(status.repeats):
        return f"Next:\n{report}"
    lines = [
        "Next:",
        f"  python -m slurmft study status {folder}   # its progress",
        f"  python -m slurmft study cancel {folder}   # end all its jobs",
        f"  {again}   # submit again what failed",
    ]
    return "\n".join(lines + ([report] if finished else []))


def next_command(study: Study, folder: Path, status: StudyStatus) -> str:
    """The command that a user types after `study status`: the one that submitted the newest run, if
    runs are left; the report, if there is something to show."""
    finished, report = status.count("finished"), _report_command(folder)
    if finished == len(status.repeats):
        return f"all runs have finished\nNext: {report}"
    so_far = f"\n  so far: {report}" if finished else ""
    if not status.count("missing") and not status.count("failed"):
        alive = [t for t in status.tries() if t.is_alive]
        newest = min(alive, key=lambda t: t.outcome != "running").run.path
        return f"Next: wait; or look: slurmft follow {shlex.quote(str(newest))}{so_far}"
    submissions = [t.run.config["submission"] for t in status.tries()]
    last: dict[str, Any] = max(submissions, key=lambda s: str(s.get("time")), default={})
    again = last.get("command") or shlex.join(["slurmft", "study", "run", str(study.path)])
    return f"Next: {again}{so_far}"


def _report_command(folder: Path) -> str:
    """The command that writes a report to the study's folder."""
    output = str(folder / "report")
    return shlex.join(["python", "-m", "slurmft", "report", str(folder), "--output", output])
