"""Submits the runs that a study lacks.

On Slurm, runs with the same request are one job array. The first repeats of all cells come first,
and every array waits for the end of the one before it: never more than `at_most` jobs run at a
time, repeats are interleaved, and nothing depends on the login session. Elsewhere they run one
after another.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.cluster import dependency, launcher, wait
from slurmft.cluster.slurm import commands, job_array
from slurmft.cluster.slurm.sbatch_options import DEPENDENCIES
from slurmft.cluster.status import RunStatus
from slurmft.cluster.submit import check, create, provenance, submit
from slurmft.core import interpreter, interruption, permissions, run_files
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.options import flag
from slurmft.core.site import in_file, merge, site_defaults
from slurmft.core.text import some
from slurmft.plugins.studies import cells, programs, spec
from slurmft.plugins.studies import folder as study_folder
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

_COMMAND_FIELDS = ("argv", "folder", "file")
"""Fields of a program of the user's own that are no options, and say what runs."""

Configs = dict[tuple[str, int], RunConfig]
"""Key of a cell and number of a repeat -> configuration of its run."""


def with_flags(study: Study, flags: dict[str, Any]) -> Study:
    """Returns the study with flags that override what its file fixes."""
    for name in flags:
        if name in study.varied:
            raise UsageError(
                f"{flag(name)}: the study {study.name} varies {name}",
                "leave the flag out, or change the study file",
            )
    if study.program:
        # The check is one of TOML's values, where an option that repeats is a list.
        values = {}
        for name, value in flags.items():
            values[name] = list(value) if isinstance(value, tuple) else value
        programs.typed(f"{study.path.name}, flags", values)
    changed = replace(study, fixed=merge(study.fixed, flags))
    spec.check_work(changed)
    return changed


def configurations(study: Study, folder: Path, make: bool = True) -> Configs:
    """Returns the configurations of all runs of a study.

    Args:
        make: whether folders are made that the runs need: see `submission.configure`.

    Raises:
        UsageError: a cell's settings are not valid; the message names the cell.
    """
    site_options = OPTIONS
    if study.program:
        site_options = OPTIONS | FLAGS
    site = site_defaults(site_options)
    fixed = study.fixed | {"runs_dir": str(folder / study_folder.RUNS)}
    # The site file's name would be overridden by one in `fixed`.
    if "job_name" not in site:
        fixed = {"job_name": study.name} | fixed
    study = replace(study, fixed=fixed)
    configs: Configs = {}
    for repeat, cell in spec.rounds(study):
        key = spec.key_of(cell)
        try:
            if study.program:
                config = _configure_own(study, cell, repeat, make)
            elif repeat == 1:
                config = _configure_training(study, cell, site)
            else:
                # Only the seed differs: to configure it again would check all data again.
                config = _with_next_seed(configs[key, 1], repeat)
            if config.job.min_nodes is not None:
                raise UsageError(
                    f"--nodes {config.job.node_range}: a study measures fixed numbers of nodes",
                    "give one number",
                )
            job = replace(config.job, cluster=check(config))
            configs[key, repeat] = replace(config, job=job)
        except UsageError as error:
            where = f"the cell {spec.label(cell)!r} of {study.path.name}"
            raise in_file(where, error) from None
    if study.program:
        program_settings = [config.program.settings for config in configs.values()]
        programs.check_apart(program_settings, study.varied)
    return _settle_dependencies(configs)


def _configure_training(
    study: Study,
    cell: spec.Cell,
    site: dict[str, Any],
) -> RunConfig:
    """Returns the configuration of the first repeat of a cell that trains."""
    values = study.fixed | spec.typed(cell)
    filled = recipes.fill(merge(site, values))
    return configure(spec.divide_batch(values, filled))


def _with_next_seed(config: RunConfig, repeat: int) -> RunConfig:
    """Returns the configuration of a repeat, from that of the first one."""
    settings = dict(config.program.settings)
    settings["seed"] += repeat - 1
    program = replace(config.program, settings=settings)
    return replace(config, program=program)


def _configure_own(study: Study, cell: spec.Cell, repeat: int, make: bool) -> RunConfig:
    """Returns the configuration of a run of a program of the user's own."""
    # The other values of a cell are those of placeholders, which no option has.
    options = {}
    for name, value in cell.items():
        if name in programs.RUN_OPTIONS:
            options[name] = value
    program = programs.fill(study.program, study.fixed | cell, repeat)
    values = study.fixed | spec.typed(options) | program
    command = values.pop("command")
    return submission.configure(command, values, OPTIONS | FLAGS, make)


def _settle_dependencies(configs: Configs) -> Configs:
    """Returns the configurations with the jobs that they wait for."""
    # No cell varies what its run waits for, so the jobs are looked up once.
    first = next(iter(configs.values()))
    settled = dependency.settled(first, first.job.cluster, None)
    paths = {name: getattr(settled.job, name) for name in DEPENDENCIES}
    settled_configs: Configs = {}
    for key, config in configs.items():
        job = replace(config.job, **paths)
        settled_configs[key] = replace(config, job=job, submission=settled.submission)
    return settled_configs


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
        """The cluster of the first run, which is that of all: no cell can vary it."""
        first = next(iter(self.configs.values()))
        return first.job.cluster

    def due(self) -> list[Repeat]:
        """Returns the repeats to submit: missing ones, and failed ones that may be tried again."""
        due = []
        for repeat in self.status.repeats:
            if repeat.state in ("missing", "failed") and not self.given_up(repeat):
                due.append(repeat)
        return due

    def given_up(self, repeat: Repeat) -> bool:
        """Returns whether a repeat has failed more often than the study allows."""
        return repeat.state == "failed" and repeat.failures > self.study.retries

    def provenance(self) -> run_files.Submission:
        return provenance("study", ["run", *self.argv])

    def new_run(
        self,
        repeat: Repeat,
        provenance: run_files.Submission,
    ) -> tuple[RunConfig, str]:
        """Returns the configuration of a repeat's new run, which names its cell; and the mark in
        the name of its directory."""
        # By this entry the run is found again: no status of the study is stored.
        entry = run_files.StudyEntry(
            name=self.study.name,
            cell=repeat.cell,
            repeat=repeat.number,
        )
        config = self.configs[repeat.key]
        waits_for = config.submission.dependency
        submission = replace(provenance, dependency=waits_for, study=asdict(entry))
        config = replace(config, submission=submission)
        return config, self.mark(repeat)

    def mark(self, repeat: Repeat) -> str:
        """Returns what the name of a repeat's run directory says of it; a random part follows."""
        cell_number = self.study.cells.index(repeat.cell) + 1
        return f"c{cell_number}-r{repeat.number}"


def check_settings(todo: Submission, yes: bool) -> list[str]:
    """Checks that all runs that count have the settings that the study has now.

    Failed runs with other settings do not count as tries: the change may have mended them.

    Returns:
        Warnings, if `yes` counts runs with other settings as the same measurement.
    """
    differences = []
    for repeat in todo.status.repeats:
        # A copy, because the loop removes from the list.
        for attempt in list(repeat.tries):
            difference = _difference(attempt.run, todo.configs[repeat.key])
            if not difference:
                continue
            if attempt.state == "failed":
                repeat.tries.remove(attempt)
            else:
                differences.append(f"{difference} ({attempt.run.name})")
    if not differences:
        return []
    what = (
        f"{len(differences)} run(s) in {str(todo.folder)!r} have other settings than the study "
        f"now: {differences[0]}"
    )
    if yes:
        return [f"warning: {what}; counted because of --yes"]
    hint = "give the study another name; or --yes, if they measure the same"
    raise UsageError(what, hint)


def _difference(run: MeasuredRun, config: RunConfig) -> str:
    """Describes the settings in which a run differs from a configuration; "" if none matters."""
    # Through JSON, as the run's own: tuples are lists there, and paths are texts.
    current: dict[str, Any] = json.loads(config.to_json())
    settings = current["job"] | current["program"]["settings"]
    differences = _changed_settings(run, settings)
    differences += _changed_inputs(run, current["program"]["inputs"])
    return some(differences, 3)


def _changed_settings(run: MeasuredRun, current: dict[str, Any]) -> list[str]:
    """Lists the settings that matter and are now others than in the run."""
    declared = cells.declarations(run)
    run_settings = _settings_as_typed(run) | run.config["job"]
    differences = []
    for name, value in run_settings.items():
        matters = name in _COMMAND_FIELDS
        if name in declared:
            matters = declared[name].affects_measurement
        # A run of another version may have a setting that there is no more.
        if matters and name in current and current[name] != value:
            differences.append(f"{name} was {value!r}, is {current[name]!r}")
    return differences


def _changed_inputs(run: MeasuredRun, current: dict[str, Any]) -> list[str]:
    """Lists the files and folders whose contents are now others than in the run."""
    run_inputs = run.config["program"].get("inputs", {})
    differences = []
    for path, facts in current.items():
        # A path that the run did not have is another setting, not a changed file.
        if path in run_inputs and run_inputs[path]["sha256"] != facts["sha256"]:
            differences.append(f"{path} has changed")
    return differences


def _settings_as_typed(run: MeasuredRun) -> dict[str, Any]:
    """Returns the settings of a run's program as they were before its code was copied."""
    if not run.is_own_program:
        return run.settings
    # The run starts the copy of the file in its own directory, which is another in every run.
    code = str(RunDir(run.path).code)
    argv = []
    for word in run.settings["argv"]:
        if word.startswith(code):
            word = run.settings["file"]
        argv.append(word)
    return run.settings | {"argv": interpreter.with_folder(argv)}


# --- on Slurm -------------------------------------------------------------------------------------


def submit_arrays(
    todo: Submission, due: Sequence[Repeat]
) -> dict[tuple[str, int], str]:
    """Submits the arrays, each to start after the one before.

    If Slurm refuses an array, those before it stay, and the others leave nothing.

    Returns:
        Key of a repeat -> its job.
    """
    scripts = todo.folder / "arrays"
    share = any(config.job.share_with_group for config in todo.configs.values())
    permissions.make_folder(scripts, share, exist_ok=True)
    with study_folder.held(scripts):
        return _submit_each(todo, due, scripts)


def _submit_each(
    todo: Submission, due: Sequence[Repeat], scripts: Path
) -> dict[tuple[str, int], str]:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    provenance = todo.provenance()
    jobs: dict[tuple[str, int], str] = {}
    # Also after jobs of an earlier call: they would run beside these, more than `at_most`.
    after = live_jobs(todo.status.alive())
    for number, group in enumerate(by_request(todo, due), start=1):
        try:
            with interruption.deferred():
                runs = _create_all(todo, group, provenance)
                script = scripts / f"{stamp}-{number}.sh"
                array = job_array.submit(runs, todo.study.at_most, after, script)
        except SlurmftError as error:
            before = f"; {len(jobs)} run(s) were submitted before" if jobs else ""
            message = f"{error.message}{before}"
            raise SlurmftError(message, error.hint, error.code) from None
        # Tasks of an array are numbered in the order of its runs.
        for index, repeat in enumerate(group):
            jobs[repeat.key] = array_task_id(array, index)
        after = [array]
    return jobs


def _create_all(
    todo: Submission,
    group: Sequence[Repeat],
    provenance: run_files.Submission,
) -> list[RunDir]:
    """Creates the run directories of repeats; if one fails, none stays."""
    runs: list[RunDir] = []
    with contextlib.ExitStack() as undo:
        for repeat in group:
            config, mark = todo.new_run(repeat, provenance)
            run = create(config, mark)
            undo.callback(run.discard)
            runs.append(run)
        # All are there: from here on, `job_array.submit` removes them where it fails.
        undo.pop_all()
    return runs


def by_request(todo: Submission, due: Sequence[Repeat]) -> list[list[Repeat]]:
    """Returns the repeats of each array: with one number, and one request."""
    largest = commands.max_array_size()
    arrays = []
    # Number by number: the first repeats of all cells come before the second ones.
    for number in range(1, todo.study.repeats + 1):
        members = [repeat for repeat in due if repeat.number == number]
        configs = [todo.configs[repeat.key] for repeat in members]
        for indices in job_array.groups(configs, largest):
            arrays.append([members[index] for index in indices])
    return arrays


def live_jobs(tries: Sequence[RunStatus]) -> list[str]:
    """Returns the jobs and arrays of runs that wait or run, the newest last."""
    jobs = {array_of(run.job) for run in tries if run.is_alive}
    jobs.discard("")
    # Ids are texts of a rising number: a longer one is a larger one.
    return sorted(jobs, key=lambda job: (len(job), job))


# --- without Slurm --------------------------------------------------------------------------------


def run_one(todo: Submission, repeat: Repeat) -> RunDir:
    """Runs one repeat to its end. Ctrl-C ends and removes the run; after another signal it goes on,
    and `study run` waits for it when it is called again."""
    try:
        with interruption.deferred():
            provenance = todo.provenance()
            config, mark = todo.new_run(repeat, provenance)
            run = submit(config, todo.cluster, mark)
        wait_for_end(run)
    except interruption.Interruption:
        raise
    except KeyboardInterrupt:
        # First the end, then the directory: a process that still runs would write into it.
        with interruption.deferred():
            wait.cancel(run)
            wait_for_end(run, _CANCEL_S)
        run.discard()
        raise
    return run


def wait_for_end(run: RunDir, limit_s: float = math.inf) -> None:
    """Waits for the end of a run's job; the run's state then says how it ended."""
    job = wait.JobWatch(run)
    # A run that fails is one more try of its repeat, and does not end the study.
    with contextlib.suppress(SlurmftError, TimeoutError):
        job.wait(limit_s)


# --- cancelling -----------------------------------------------------------------------------------


def cancel(alive: Sequence[RunStatus]) -> None:
    """Ends the jobs of runs on this cluster."""
    on_slurm = [status for status in alive if status.cluster == "slurm"]
    jobs = live_jobs(on_slurm)
    if jobs:
        # The last arrays first: otherwise each would start when the one before it is gone.
        commands.cancel(*reversed(jobs))
    for status in alive:
        run = RunDir(status.run.path)
        if status.cluster == "slurm":
            # A run that has not started cannot record it itself.
            run.set_state("cancelled", "by slurmft study cancel", Exit.CANCELLED)
        elif status.job:
            launcher.get(status.cluster).cancel(status.job, run)
