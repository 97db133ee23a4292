"""Submits the runs that a study lacks.

On Slurm, runs with the same request are one job array. The first repeats of all cells come first,
and every array waits for the end of the one before it: never more than `at_most` jobs run at a
time, repeats are interleaved, and nothing depends on the login session. Elsewhere they run one
after another.
"""

import contextlib
import json
import math
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.cluster import dependency, launcher, wait
from slurmft.cluster.slurm import commands, job_array
from slurmft.cluster.status import RunStatus
from slurmft.cluster.submit import check, create, provenance, submit
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.options import flag
from slurmft.core.site import in_file, merge, site_defaults
from slurmft.core.text import some
from slurmft.plugins.studies import cells, programs, spec
from slurmft.plugins.studies.folder import Repeat, StudyStatus
from slurmft.plugins.studies.spec import Study
from slurmft.programs import submission
from slurmft.programs.description import FLAGS
from slurmft.runs.job_ids import array_of, array_task_id
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.train import recipes
from slurmft.train.login.configure import OPTIONS, configure

_CANCEL_S = 60

_OF_COMMAND = ("argv", "folder", "file")
"""Fields of a program of the user's own that are no options, and say what runs."""


def with_flags(study: Study, flags: dict[str, Any]) -> Study:
    """The study with flags that override what its file fixes."""
    for name in flags:
        if name in study.varied:
            raise UsageError(
                f"{flag(name)}: the study {study.name} varies {name}",
                "leave the flag out, or change the study file",
            )
    if study.program:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items()}
        programs.typed(f"{study.path.name}, flags", values)
    changed = replace(study, fixed=merge(study.fixed, flags))
    spec.check_work(changed)
    return changed


Configs = dict[tuple[str, int], RunConfig]


def configurations(study: Study, folder: Path, make: bool = True) -> Configs:
    """Cell and repeat -> configuration of its run. `make`: see `submission.configure`."""
    found: Configs = {}
    site = site_defaults(OPTIONS | FLAGS if study.program else OPTIONS)
    named = {} if "job_name" in site else {"job_name": study.name}
    study = replace(study, fixed=named | study.fixed | {"runs_dir": str(folder / "runs")})
    for repeat, cell in spec.rounds(study):
        key = spec.key_of(cell)
        try:
            if study.program:
                config = _configure_own(study, cell, repeat, make)
            elif repeat == 1:
                values = study.fixed | spec.typed(cell)
                config = configure(spec.divide_batch(values, recipes.fill(merge(site, values))))
            else:  # the data was checked for the first one
                config = found[key, 1]
                settings = config.program.settings
                settings = settings | {"seed": settings["seed"] + repeat - 1}
                config = replace(config, program=replace(config.program, settings=settings))
            job = replace(config.job, cluster=check(config.job))
            found[key, repeat] = replace(config, job=job)
        except UsageError as error:
            raise in_file(f"the cell {spec.label(cell)!r} of {study.path.name}", error) from None
    if study.program:
        programs.check_apart([c.program.settings for c in found.values()], study.varied)
    first = next(iter(found.values()))  # all wait for the same
    waits = dependency.settled(first, first.job.cluster, None)
    paths = {name: getattr(waits.job, name) for name in dependency.KINDS}
    return {
        which: replace(each, job=replace(each.job, **paths), submission=waits.submission)
        for which, each in found.items()
    }


def _configure_own(study: Study, cell: spec.Cell, repeat: int, make: bool) -> RunConfig:
    """Returns the configuration of a run of a program of the user's own."""
    options = {name: value for name, value in cell.items() if name in programs.RUN_OPTIONS}
    program = programs.fill(study.program, study.fixed | cell, repeat)
    values = study.fixed | spec.typed(options) | program
    command = values.pop("command")
    return submission.configure(command, values, OPTIONS | FLAGS, make)


@dataclass(frozen=True, slots=True)
class Submission:
    """A study with the status of its runs: the work of one `slurmft study run`."""

    study: Study
    folder: Path
    configs: Configs
    """Key of a repeat -> configuration of its run."""
    status: StudyStatus
    argv: list[str]

    @property
    def cluster(self) -> str:
        return next(iter(self.configs.values())).job.cluster

    def due(self) -> list[Repeat]:
        """Returns the repeats to submit: missing ones, and failed ones that may be tried again."""
        return [
            repeat
            for repeat in self.status.repeats
            if repeat.state in ("missing", "failed") and not self.given_up(repeat)
        ]

    def given_up(self, repeat: Repeat) -> bool:
        return repeat.state == "failed" and repeat.failures > self.study.retries

    def provenance(self) -> dict[str, Any]:
        return provenance("study", ["run", *self.argv])

    def new_run(self, repeat: Repeat, provenance: dict[str, Any]) -> tuple[RunConfig, str]:
        """Returns the configuration of a repeat's new run, which names its cell; and the suffix of
        the name of its directory."""
        number = self.study.cells.index(repeat.cell) + 1
        study = {"name": self.study.name, "cell": repeat.cell, "repeat": repeat.number}
        config = self.configs[repeat.key]
        submission = config.submission | provenance | {"study": study}
        config = replace(config, submission=submission)
        return config, f"c{number}-r{repeat.number}-{secrets.token_hex(2)}"


def check_settings(todo: Submission, yes: bool) -> list[str]:
    """Checks that all runs that count have the settings that the study has now.

    Failed runs with other settings do not count as tries: the change may have mended them.

    Returns:
        Warnings, if `yes` counts runs with other settings as the same measurement.
    """
    different = []
    for repeat in todo.status.repeats:
        for each in list(repeat.tries):
            words = _difference(each.run, todo.configs[repeat.key])
            if words and each.state == "failed":
                repeat.tries.remove(each)
            elif words:
                different.append(f"{words} ({each.run.name})")
    if not different:
        return []
    what = (
        f"{len(different)} run(s) in {str(todo.folder)!r} have other settings than the study now: "
        f"{different[0]}"
    )
    if yes:
        return [f"warning: {what}; counted because of --yes"]
    raise UsageError(what, "give the study another name; or --yes, if they measure the same")


def _difference(run: MeasuredRun, config: RunConfig) -> str:
    """Describes the settings in which a run differs from a configuration; "" if none matters."""
    current: dict[str, Any] = json.loads(config.to_json())
    current_settings = current["job"] | current["program"]["settings"]
    declared = cells.declarations(run)
    differences = []
    for name, value in (_settings_as_typed(run) | run.config["job"]).items():
        matters = name in _OF_COMMAND
        if name in declared:
            matters = declared[name].affects_measurement
        # An older version may not know a setting.
        if matters and name in current_settings and current_settings[name] != value:
            differences.append(f"{name} was {value!r}, is {current_settings[name]!r}")
    inputs = run.config["program"].get("inputs", {})
    for path, facts in current["program"]["inputs"].items():
        if inputs.get(path, facts)["sha256"] != facts["sha256"]:
            differences.append(f"{path} has changed")
    return some(differences, 3)


def _settings_as_typed(run: MeasuredRun) -> dict[str, Any]:
    """Returns the settings of a run's program as they were before its code was copied."""
    if not run.is_own:
        return run.settings
    code = str(RunDir(run.path).code)
    argv = [run.settings["file"] if w.startswith(code) else w for w in run.settings["argv"]]
    if argv[1:2] == ["-P"]:  # a module's: it keeps the folder off its path
        del argv[1]
    return run.settings | {"argv": argv}


# --- on Slurm -------------------------------------------------------------------------------------


def submit_arrays(todo: Submission, due: Sequence[Repeat]) -> dict[tuple[str, int], str]:
    """Submits the arrays, each to start after the one before; returns key of a repeat -> its job.
    Of a refusal, those before it stay, and the others leave nothing."""
    (todo.folder / "arrays").mkdir(exist_ok=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    origin = todo.provenance()
    jobs: dict[tuple[str, int], str] = {}
    after = live_jobs(todo.status.alive())
    for number, group in enumerate(by_request(todo, due), start=1):
        script = todo.folder / "arrays" / f"{stamp}-{number}.sh"
        try:
            with _uninterrupted(), contextlib.ExitStack() as undo:
                runs = []
                for repeat in group:
                    runs.append(create(*todo.new_run(repeat, origin)))
                    undo.callback(runs[-1].discard)
                undo.pop_all()
                array = job_array.submit(runs, todo.study.at_most, after, script)
        except SlurmftError as error:
            already = f"; {len(jobs)} run(s) were submitted before" if jobs else ""
            raise SlurmftError(f"{error.message}{already}", error.hint, error.code) from None
        jobs |= {repeat.key: array_task_id(array, index) for index, repeat in enumerate(group)}
        after = [array]
    return jobs


def by_request(todo: Submission, due: Sequence[Repeat]) -> list[list[Repeat]]:
    """Returns the repeats of each array: with one number, and one request."""
    largest = commands.max_array_size()
    arrays = []
    for number in range(1, todo.study.repeats + 1):
        members = [repeat for repeat in due if repeat.number == number]
        configs = [todo.configs[repeat.key] for repeat in members]
        for indices in job_array.groups(configs, largest):
            arrays.append([members[index] for index in indices])
    return arrays


def live_jobs(tries: Sequence[RunStatus]) -> list[str]:
    """Returns the jobs and arrays of runs that wait or run, the newest last."""
    jobs = {array_of(run.job) for run in tries if run.is_alive}
    return sorted(filter(None, jobs), key=lambda job: (len(job), job))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C, which must not come between a submission and the note of its job's id."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- without Slurm --------------------------------------------------------------------------------


def run_one(todo: Submission, repeat: Repeat) -> RunDir:
    """Runs one repeat to its end. An interruption ends and removes the run."""
    with _uninterrupted():
        config, suffix = todo.new_run(repeat, todo.provenance())
        run = submit(config, todo.cluster, suffix)
    try:
        wait_for_end(run)
    except KeyboardInterrupt:
        with _uninterrupted():
            wait.cancel(run)
            wait_for_end(run, _CANCEL_S)
        run.discard()
        raise
    return run


def wait_for_end(run: RunDir, limit_s: float = math.inf) -> None:
    """Waits for the end of a run's job; the run's state then says how it ended."""
    job = wait.JobWatch(run)
    with contextlib.suppress(SlurmftError, TimeoutError):
        job.wait(limit_s)


# --- cancelling -----------------------------------------------------------------------------------


def cancel(alive: Sequence[RunStatus]) -> None:
    """Ends the jobs of runs on this cluster."""
    # The last arrays first: otherwise each would start when the one before it is gone.
    if jobs := live_jobs([t for t in alive if t.cluster == "slurm"])[::-1]:
        commands.cancel(*jobs)
    for each in alive:
        run = RunDir(each.run.path)
        if each.cluster == "slurm":  # a run that has not started cannot record it itself
            run.set_state("cancelled", "by slurmft study cancel", Exit.CANCELLED)
        elif each.job:
            launcher.get(each.cluster).cancel(each.job, run)
