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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft import container, grid, launchers, recipes, slurm, stage, tracking
from slurmft.cli import shown
from slurmft.config import RunConfig
from slurmft.dispatch import configure, merge, submit
from slurmft.errors import Exit, SlurmftError, UsageError
from slurmft.grid import Study
from slurmft.launchers import array
from slurmft.launchers.slurm import inside_text
from slurmft.progress import duration
from slurmft.rundir import RunDir
from slurmft.runs import MeasuredRun
from slurmft.site import site_defaults
from slurmft.standing import Standing
from slurmft.tally import Repeat, Tally

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
            by_cell[grid.key_of(cell)] = _configure(study, cell, folder)
        except UsageError as error:
            where = f"the cell {grid.label(cell)!r} of {study.path.name}"
            raise UsageError(f"{where}: {error.message}", error.hint) from None
    for repeat, cell in grid.rounds(study):
        key = grid.key_of(cell)
        train = by_cell[key].train
        train = dataclasses.replace(train, seed=train.seed + repeat - 1)
        found[key, repeat] = dataclasses.replace(by_cell[key], train=train)
    return found


def _configure(study: Study, cell: grid.Cell, folder: Path) -> RunConfig:
    site, values = site_defaults(), study.fixed | grid.typed(cell)
    if "job_name" not in site:
        values = {"job_name": study.name} | values
    plain = {k: v for k, v in values.items() if k != grid.GLOBAL_BATCH_SIZE}
    divided = grid.divide_batch(values, recipes.fill(merge(site, plain)))
    config = configure(divided | {"runs_dir": str(folder / "runs")})
    cluster = launchers.choose(config.job.cluster)
    container.check(config.job, cluster)
    stage.check(config.job, cluster)
    tracking.check(config.job)
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
        return self.configs[grid.key_of(repeat.cell), repeat.number]

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
    for part in ("train", "job"):
        for name, value in wanted[part].items():
            old = run.config[part].get(name, value)  # an older version may not know it
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
    largest, found = slurm.max_array_size(), []
    for number in range(1, todo.study.repeats + 1):
        members = [r for r in due if r.number == number]
        jobs = [todo.config(r).job for r in members]
        found += [[members[i] for i in group] for group in array.groups(jobs, largest)]
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
                made = array.submit(runs, todo.study.at_most, after, script)
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
        cells = "; ".join(grid.label(r.cell) for r in group)
        lines.append(
            f"# array {number}: repeat {group[0].number}, {len(group)} run(s), at most "
            f"{todo.study.at_most} at a time{waits}: {shown(cells, 100)}"
        )
        after = [f"array {number}"]
    config, folder = todo.config(groups[0][0]), todo.folder / "arrays"
    runs = [
        RunDir(Path(config.job.runs_dir) / f"{config.train.task}-<time>-c{n}-r1-<random>")
        for n in range(1, len(groups[0]) + 1)
    ]
    at_most, waits_for = todo.study.at_most, live_jobs(todo.tally.alive())
    made = array.array_options(config.job, len(runs), at_most, waits_for, folder)
    lines += ["", "# sbatch script of array 1", array.script_text(made, runs)]
    return [*lines, "# script of its first run", inside_text(config, runs[0], array.JOB)]


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
                bar.set_description(f"{grid.label(repeat.cell)}, repeat {repeat.number}")
            began = time.monotonic()
            state, reason, path = _run_one(todo, repeat, provenance)
            took = duration(time.monotonic() - began)
            what = f"{number}/{len(due)} {grid.label(repeat.cell)}, repeat {repeat.number}: "
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
            f"\ninterrupted: the run of {grid.label(repeat.cell)} was removed, finished ones stay. "
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
    cluster, job = launchers.job_of(run)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        state = launchers.get(cluster).job_state(job, run)
        if state is None or state.ended:
            return
        time.sleep(_POLL_S)


def _stop(run: RunDir) -> None:
    """Ends a run of this machine, and waits until it has."""
    cluster, job = launchers.job_of(run)
    with uninterrupted():
        launchers.get(cluster).cancel(job, run)
        _await_end(run, _CANCEL_S)
