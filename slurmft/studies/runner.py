"""The runs that a study lacks: their configurations, and how they are submitted.

On Slurm, runs with the same request are one job array. The first repeats of all cells come first,
and every array waits for the end of the one before it: never more than `at_most` jobs run at a
time, repeats are interleaved, and nothing depends on the login session. Elsewhere they run one
after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.cluster import launcher, status
from slurmft.cluster.slurm import commands, job_array
from slurmft.cluster.slurm.launcher import inside_text
from slurmft.cluster.status import Standing
from slurmft.cluster.submit import check, provenance, submit
from slurmft.core.config import RunConfig, flag
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.site import merge, site_defaults
from slurmft.core.text import duration, shown
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.studies import folder as study_folder
from slurmft.studies import progress as study_progress
from slurmft.studies import spec
from slurmft.studies.progress import Repeat, Tally
from slurmft.studies.spec import GLOBAL_BATCH_SIZE, Study
from slurmft.train import recipes
from slurmft.train.config import TrainConfig
from slurmft.train.configure import OPTIONS, configure

ASK_ABOVE = 1000
"""Runs that are submitted without a question."""


def with_flags(study: Study, flags: dict[str, Any]) -> Study:
    """The study with flags in place of what its file fixes.

    Raises:
        UsageError: a flag for what the study varies, or one that contradicts the kind of scaling.
    """
    for name in flags:
        if name in study.varied:
            raise UsageError(
                f"{flag(name)}: the study {study.name} varies {name}",
                "leave the flag out, or change the study file",
            )
    named = {*study.fixed, *study.varied}
    if "batch_size" in flags and GLOBAL_BATCH_SIZE in named:
        raise UsageError(
            f"--batch-size {flags['batch_size']}: the study {study.name} has {GLOBAL_BATCH_SIZE}",
            "leave the flag out, or change the study file",
        )
    changed = dataclasses.replace(study, fixed=merge(study.fixed, flags))
    spec.check_work(changed)
    return changed


def submit_due(todo: Submission) -> int:
    """Submits or runs what is due, and says so; returns the exit code."""
    for line in study_folder.warnings(todo.tally):
        print(line, file=sys.stderr)
    due, told = todo.due(), provenance("study", ["run", *todo.argv])
    now = todo.tally
    given_up = [r for r in todo.tally.repeats if todo.given_up(r)]
    code: int = Exit.FAILED if given_up else Exit.OK
    if due and todo.cluster != "slurm":
        code = max(run_here(todo, due, told), code)
        now = study_progress.take(todo.study, todo.folder)
        print(study_progress.status_table(todo.study, now))
    else:
        jobs = submit_arrays(todo, due, told) if due else {}
        print(done_table(todo, jobs))
    for repeat in given_up:
        print(_given_up_text(repeat, todo.study))
    print(f"study folder: {todo.folder}")
    print(next_commands(todo, now))
    return code


def next_commands(todo: Submission, now: Tally) -> str:
    """The commands that a user types next; `now`: how the study stands."""
    folder = shlex.quote(str(todo.folder))
    again = shlex.join(["python", "-m", "slurmft", "study", "run", *todo.argv])
    look = f"  {report_command(todo.folder)}   # tables, plots, a page"
    finished = now.count("finished")
    if finished == len(now.repeats):
        return f"Next:\n{look}"
    lines = [
        "Next:",
        f"  python -m slurmft study status {folder}   # how far it is",
        f"  python -m slurmft study cancel {folder}   # end all its jobs",
        f"  {again}   # submit again what failed",
    ]
    return "\n".join(lines + ([look] if finished else []))


def done_table(todo: Submission, jobs: dict[int, str], new: str = "submitted") -> str:
    """A line for every cell: what its repeats are now.

    Args:
        todo: the submission.
        jobs: id of a repeat that was submitted -> its job; "" for one that has none yet.
        new: what those that were submitted are called.
    """
    rows = [[*todo.study.varied, "repeats"]]
    for cell, repeats in todo.tally.by_cell():
        words = Counter(new if id(r) in jobs else _word(todo, r) for r in repeats)
        ids = ", ".join(filter(None, (jobs.get(id(r)) for r in repeats)))
        text = ", ".join(f"{count} {word}" for word, count in words.items())
        rows.append([*map(str, cell.values()), text + (f" ({ids})" if ids else "")])
    return study_progress.table(rows)


def _word(todo: Submission, repeat: Repeat) -> str:
    return "given up" if todo.given_up(repeat) else repeat.state


# --- what must not be -----------------------------------------------------------------------------


def check_settings(todo: Submission, yes: bool) -> list[str]:
    """Makes sure that all runs that count have the settings that the study has now.

    Failed runs with other settings are no tries: what was wrong may be what was changed.

    Returns:
        Warnings, where `yes` says that such runs are the same measurement.

    Raises:
        UsageError: finished or running ones have others.
    """
    different: list[tuple[Standing, str]] = []
    for repeat in todo.tally.repeats:
        for each in list(repeat.tries):
            if not (words := difference(each.run, todo.config(repeat))):
                continue
            if each.state == "failed":
                repeat.tries.remove(each)
            else:
                different.append((each, words))
    if not different:
        return []
    what = (
        f"{len(different)} run(s) in {str(todo.folder)!r} have other settings than the study now: "
        f"{different[0][1]} ({different[0][0].run.name})"
    )
    if yes:
        return [f"warning: {what}; counted all the same (--yes)"]
    raise UsageError(
        what, "give the study another name; or --yes, if they measure the same all the same"
    )


def report_command(folder: Path) -> str:
    """The command that shows what a study has measured: tables, plots, a page in its folder."""
    output = str(folder / "report")
    return shlex.join(["python", "-m", "slurmft", "report", str(folder), "--output", output])


def alive_runs(folder: Path) -> list[Standing]:
    """The runs of a study that wait or run; says what it cannot read."""
    found, problems = study_progress.find(folder)
    for problem in problems:
        print(f"warning: {problem}; its job, if it has one, is not cancelled", file=sys.stderr)
    return [t for t in status.stand(r for r in found if not r.is_finished) if t.is_alive]


def cancel(study: Study, alive: list[Standing]) -> None:
    """Ends the jobs of runs, and says so.

    Raises:
        UsageError: some are on another cluster or host; the others are cancelled.
    """
    here = [t for t in alive if not t.apart]
    # The last arrays first: else each would start when the one before it is gone.
    if jobs := live_jobs([t for t in here if t.cluster == "slurm"])[::-1]:
        commands.cancel(*jobs)
    for each in here:
        run, cluster, job = RunDir(each.run.path), each.cluster, each.job
        if cluster == "slurm":  # those that have not started have no time to say so
            run.set_state("cancelled", "by slurmft study cancel", Exit.CANCELLED)
        elif job:
            launcher.get(cluster).cancel(job, run)
    print(f"{len(here)} run(s) of {study.name} are being cancelled")
    if away := [t for t in alive if t.apart]:
        raise UsageError(
            f"{len(away)} run(s) of {study.name} are {away[0].apart}",
            "slurmft study cancel there, too",
        )


_POLL_S = 0.3
_CANCEL_S = 60

_MAY_DIFFER = frozenset({
    "runs_dir", "share_with_group", "job_name", "account", "qos", "time", "mem", "reservation",
    "comment", "hostfile", "rdzv_timeout_s", "stop_lead_s", "requeue", "max_requeues",
    "max_restarts", "hang_timeout_s", "log_with",
})  # fmt: skip
"""Settings that change whether a run comes to its end, not what it measures."""


def configurations(study: Study, folder: Path) -> dict[tuple[str, int], RunConfig]:
    """Cell and repeat -> configuration of its run.

    Raises:
        UsageError: a value that cannot be right; the message names the cell.
    """
    found: dict[tuple[str, int], RunConfig] = {}
    by_cell = {}
    for cell in study.cells:
        try:
            by_cell[spec.key_of(cell)] = _configure(study, cell, folder)
        except UsageError as error:
            where = f"the cell {spec.label(cell)!r} of {study.path.name}"
            raise UsageError(f"{where}: {error.message}", error.hint) from None
    for repeat, cell in spec.rounds(study):
        key = spec.key_of(cell)
        train = TrainConfig.of(by_cell[key].program)
        train = dataclasses.replace(train, seed=train.seed + repeat - 1)
        found[key, repeat] = dataclasses.replace(by_cell[key], program=train.program())
    return found


def _configure(study: Study, cell: spec.Cell, folder: Path) -> RunConfig:
    site, values = site_defaults(OPTIONS), study.fixed | spec.typed(cell)
    if "job_name" not in site:
        values = {"job_name": study.name} | values
    plain = {k: v for k, v in values.items() if k != spec.GLOBAL_BATCH_SIZE}
    divided = spec.divide_batch(values, recipes.fill(merge(site, plain)))
    config = configure(divided | {"runs_dir": str(folder / "runs")})
    cluster = check(config.job)
    return dataclasses.replace(config, job=dataclasses.replace(config.job, cluster=cluster))


@dataclass(frozen=True, slots=True)
class Submission:
    """What one `slurmft study run` works on."""

    study: Study
    folder: Path
    configs: dict[tuple[str, int], RunConfig]
    tally: Tally
    argv: list[str]

    @property
    def cluster(self) -> str:
        return next(iter(self.configs.values())).job.cluster

    def config(self, repeat: Repeat) -> RunConfig:
        return self.configs[spec.key_of(repeat.cell), repeat.number]

    def due(self) -> list[Repeat]:
        """The repeats to submit: missing ones, and failed ones that may be tried again."""
        return [
            r
            for r in self.tally.repeats
            if r.state == "missing" or (r.state == "failed" and not self.given_up(r))
        ]

    def given_up(self, repeat: Repeat) -> bool:
        return repeat.state == "failed" and repeat.failures > self.study.retries

    def told(self, repeat: Repeat, provenance: dict[str, Any]) -> tuple[RunConfig, str]:
        """The configuration of a repeat's run, which says to which cell it belongs; and what the
        name of its directory ends with."""
        number = self.study.cells.index(repeat.cell) + 1
        mine = {"name": self.study.name, "cell": repeat.cell, "repeat": repeat.number}
        config = dataclasses.replace(self.config(repeat), submission=provenance | {"study": mine})
        return config, f"c{number}-r{repeat.number}-{secrets.token_hex(2)}"


def difference(run: MeasuredRun, config: RunConfig) -> str:
    """In which settings a run differs from a configuration, in words; "" for none that matter."""
    wanted: dict[str, Any] = json.loads(config.to_json())
    found = []
    for old_values, values in (
        (run.settings, wanted["program"]["settings"]),
        (run.config["job"], wanted["job"]),
    ):
        for name, value in values.items():
            old = old_values.get(name, value)  # an older version may not know it
            if name not in _MAY_DIFFER and old != value:
                found.append(f"{name} was {old!r}, is {value!r}")
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


# --- on Slurm -------------------------------------------------------------------------------------


def live_jobs(tries: Sequence[Standing]) -> list[str]:
    """Jobs and arrays of runs that wait or run, the newest last."""
    jobs = {t.job.partition("_")[0] for t in tries if t.is_alive}
    return sorted(filter(None, jobs), key=lambda job: (len(job), job))


def by_request(todo: Submission, due: Sequence[Repeat]) -> list[list[Repeat]]:
    """The repeats of each array: of one round, and with one request."""
    largest, found = commands.max_array_size(), []
    for number in range(1, todo.study.repeats + 1):
        members = [r for r in due if r.number == number]
        jobs = [todo.config(r).job for r in members]
        found += [[members[i] for i in group] for group in job_array.groups(jobs, largest)]
    return found


def submit_arrays(
    todo: Submission, due: Sequence[Repeat], provenance: dict[str, Any]
) -> dict[int, str]:
    """Submits the arrays, each to start after the one before; returns id of a repeat -> its job.

    Raises:
        SlurmftError: an array was refused. Those before it stay, the others have left nothing.
    """
    (todo.folder / "arrays").mkdir(exist_ok=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    jobs: dict[int, str] = {}
    after = live_jobs(todo.tally.alive())
    for number, group in enumerate(by_request(todo, due), start=1):
        script = todo.folder / "arrays" / f"{stamp}-{number}.sh"
        try:
            with uninterrupted():
                runs = create_all(todo, group, provenance)
                made = job_array.submit(runs, todo.study.at_most, after, script)
        except SlurmftError as error:
            already = f"; {len(jobs)} run(s) were submitted before" if jobs else ""
            raise SlurmftError(f"{error.message}{already}", error.hint, error.code) from None
        jobs |= {id(repeat): f"{made}_{index}" for index, repeat in enumerate(group)}
        after = [made]
    return jobs


def create_all(
    todo: Submission, group: Sequence[Repeat], provenance: dict[str, Any]
) -> list[RunDir]:
    """The run directories of a group; all or none."""
    runs: list[RunDir] = []
    try:
        for repeat in group:
            runs.append(RunDir.create(*todo.told(repeat, provenance)))
    except SlurmftError:
        for run in runs:
            run.discard()
        raise
    return runs


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets no Ctrl-C come between a submission and the note of its job's id."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def dry_arrays(todo: Submission, due: Sequence[Repeat]) -> list[str]:
    groups, lines = by_request(todo, due), []
    after = live_jobs(todo.tally.alive())
    for number, group in enumerate(groups, start=1):
        waits = f", after {', '.join(after)}" if after else ""
        cells = "; ".join(spec.label(r.cell) for r in group)
        lines.append(
            f"# array {number}: repeat {group[0].number}, {len(group)} run(s), at most "
            f"{todo.study.at_most} at a time{waits}: {shown(cells, 100)}"
        )
        after = [f"array {number}"]
    config, folder = todo.config(groups[0][0]), todo.folder / "arrays"
    runs = [
        RunDir(Path(config.job.runs_dir) / f"{config.program.name}-<time>-c{n}-r1-<random>")
        for n in range(1, len(groups[0]) + 1)
    ]
    at_most, waits_for = todo.study.at_most, live_jobs(todo.tally.alive())
    made = job_array.array_options(config.job, len(runs), at_most, waits_for, folder)
    lines += ["", "# sbatch script of array 1", job_array.script_text(made, runs)]
    return [*lines, "# script of its first run", inside_text(config, runs[0], job_array.JOB)]


# --- without Slurm --------------------------------------------------------------------------------


def run_here(todo: Submission, due: Sequence[Repeat], provenance: dict[str, Any]) -> int:
    """Runs one repeat after another; returns the exit code. Ctrl-C leaves no half a run."""
    code, bar = int(Exit.OK), _bar(len(due))
    say: Callable[[str], None] = bar.write if bar else lambda text: print(text, flush=True)
    try:
        for each in todo.tally.alive():
            say(f"waits for the end of {each.run.path}, which runs since before")
            _await_end(RunDir(each.run.path))
        for number, repeat in enumerate(due, start=1):
            if bar:
                bar.set_description(f"{spec.label(repeat.cell)}, repeat {repeat.number}")
            began = time.monotonic()
            state, reason, path = _run_one(todo, repeat, provenance)
            took = duration(time.monotonic() - began)
            what = f"{number}/{len(due)} {spec.label(repeat.cell)}, repeat {repeat.number}: "
            say(what + (f"{state} in {took}" if state == "finished" else f"{state}: {reason}"))
            if state != "finished":
                say(f"  look into {path}")
                code = Exit.FAILED
            if state == "cancelled":
                say("cancelled from elsewhere: no further runs")
                return Exit.CANCELLED
            if bar:
                bar.update()
    finally:
        if bar:
            bar.close()
    return code


def _bar(total: int) -> Any:
    """A bar over runs, on a terminal; else None."""
    if not sys.stdout.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, unit="run", file=sys.stdout)


def _run_one(todo: Submission, repeat: Repeat, provenance: dict[str, Any]) -> tuple[str, str, Path]:
    """Runs one repeat to its end; returns state, reason and run directory."""
    with uninterrupted():
        config, mark = todo.told(repeat, provenance)
        run = submit(config, todo.cluster, mark)
    try:
        _await_end(run)
    except KeyboardInterrupt:
        _stop(run)
        run.discard()
        print(
            f"\ninterrupted: the run of {spec.label(repeat.cell)} was removed, finished ones stay. "
            f"To go on: {shlex.join(['slurmft', 'study', 'run', *todo.argv])}"
        )
        raise
    state = run.get_state()
    if state["state"] not in ("finished", "cancelled", "failed"):
        failure = run.root_failure()
        reason = failure["message"] if failure else "its job ended without a word"
        run.set_state("failed", reason, Exit.FAILED)
        state = run.get_state()
    return state["state"], state["reason"], run.path


def _await_end(run: RunDir, limit_s: float = float("inf")) -> None:
    cluster, job = launcher.job_of(run)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        state = launcher.get(cluster).job_state(job, run)
        if state is None or state.ended:
            return
        time.sleep(_POLL_S)


def _stop(run: RunDir) -> None:
    """Ends a run of this machine, and waits until it has."""
    cluster, job = launcher.job_of(run)
    with uninterrupted():
        launcher.get(cluster).cancel(job, run)
        _await_end(run, _CANCEL_S)


def _given_up_text(repeat: Repeat, study: Study) -> str:
    assert repeat.best is not None
    return (
        f"given up after {repeat.failures} failed run(s): {spec.label(repeat.cell)}, repeat "
        f"{repeat.number}: {shown(repeat.best.reason)}\n"
        f"  look into {repeat.best.run.path}, or raise retries = {study.retries} in the study file"
    )
