"""Submits jobs: checks, dry run, provenance, run directory, launcher. Resumes runs."""

import contextlib
import dataclasses
import functools
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import slurmft
from slurmft import locks
from slurmft.cluster import container, dependency, dry_run, shared_outputs
from slurmft.cluster import launcher as cluster_launcher
from slurmft.cluster.job_state import NO_ANSWER
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm import launcher as slurm_launcher
from slurmft.cluster.slurm.sbatch_options import DEPENDENCIES
from slurmft.core import (
    fingerprint,
    hooks,
    permissions,
    plugins,
    trusted,
    users,
    writers,
)
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.credentials import redact
from slurmft.core.decode import decode_leniently
from slurmft.core.errors import SlurmftError, SlurmftWarning, UsageError
from slurmft.core.files import read_bytes, write_bytes, write_text
from slurmft.core.job_variables import outside_of_jobs
from slurmft.core.options import Option, options, unread
from slurmft.core.program import kind_of
from slurmft.core.run_files import Submission
from slurmft.core.site import site_files
from slurmft.node import ccl
from slurmft.runs import frozen_code, request
from slurmft.runs.rundir import RunDir


def check(config: RunConfig, run: RunDir | None = None) -> str:
    """Checks that a job can be submitted from here; returns the cluster that it will run on. Warns
    where others can put a run of theirs in the place of its own. SlurmftError where this cluster,
    environment or site does not support an option.

    Args:
        run: the one that resumes.
    """
    job = config.job
    if run is None:
        warn_of_renaming(Path(job.runs_dir) / "run")
    else:
        warn_of_renaming(run.path)
    cluster = cluster_launcher.choose(job.cluster)
    container.check(job, cluster)
    hooks.check(job, cluster)
    if cluster == "slurm":
        commands.check_cluster()
        slurm_launcher.check_expedited(job)
    # An image, or modules that --setup loads, may have what this machine lacks.
    if job.container is None and not job.setup:
        ccl.check(job.backend, kind_of(config.program).python)
    return cluster


def warn_of_unread(
    config: RunConfig,
    cluster: str,
    flags: Iterable[str],
    declared: Mapping[str, Option],
) -> None:
    """Warns of each flag that was typed and has no effect because of other options.

    Args:
        cluster: the one that `check` returns.
        flags: names of the options that were typed.
        declared: name -> declaration of the options of the command.
    """
    values = config.program.settings | config.job.values() | {"cluster": cluster}
    launcher = plugins.find(plugins.LAUNCHERS, cluster)
    # Another package's launcher may read what Slurm reads.
    if launcher is None or launcher.package != plugins.OURS:
        del values["cluster"]
    for remark in unread(flags, declared, values):
        warnings.warn(remark, SlurmftWarning, stacklevel=3)


def warn_of_renaming(run: Path) -> None:
    """Warns of a folder in which somebody else can rename a run, and put another in its place; of
    each once."""
    renaming = trusted.renaming_on_the_way(run)
    # Where everybody can, the submission is refused: see `RunDir.create`.
    if renaming is not None and renaming.who != writers.EVERYBODY:
        _warn_of(renaming)


@functools.cache
def _warn_of(renaming: trusted.Renaming) -> None:
    folder = str(renaming.folder)
    cure = "give a folder of your own: --runs-dir"
    if renaming.is_own:
        cure = f"chmod +t {shlex.quote(folder)}; or {cure}"
    remark = (
        f"{renaming.who} can rename what is in {folder!r} (mode {renaming.mode:04o}), and "
        "so put another run in the place of yours; your job starts only with a run that is yours\n"
        f"hint: to keep it from that: {cure}"
    )
    warnings.warn(remark, SlurmftWarning, stacklevel=4)


def provenance(command: str, argv: list[str]) -> Submission:
    """Returns when, where, by whom, by which command and from which code a run is submitted."""
    return provenance_of(shlex.join(["slurmft", command, *argv]))


def provenance_of(command: str) -> Submission:
    """Returns the provenance of a command or a call, as it was written."""
    files = [str(file) for file in site_files()]
    here = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        "user": users.user_name(os.getuid()),
        "folder": os.getcwd(),
        "command": redact(command),
        "site_file": ", ".join(files) or None,
        "slurmft": slurmft.__version__,
        "python": sys.version.split()[0],
        "code": fingerprint.of_code(),
        "git": _git_facts(),
    }
    # Of a command with --on, the facts of the machine where it was typed take the place of these.
    return decode_leniently(here | request.facts(), Submission)


def _git_facts() -> dict[str, Any] | None:
    """Returns the commit of the present folder; None: there is none, or a warning says why it is
    not recorded."""
    from slurmft.core import git  # 3 ms, which a dry run does without

    try:
        commit = git.head(Path.cwd())
    except UsageError as error:
        remark = f"the commit of this folder is not recorded: {error.message}"
        warnings.warn(remark, SlurmftWarning, stacklevel=2)
        return None
    if commit is None:
        return None
    return dataclasses.asdict(commit)


def submit(config: RunConfig, cluster: str, mark: str = "") -> RunDir:
    """Submits a job; returns its run directory, whose name has `mark`. A request that comes again,
    as after a cut connection, gets the run that it has submitted.

    Raises:
        SlurmftError: the job was refused, or would wait forever. The run directory is removed.
    """
    config = dependency.settled(config, cluster, config.job.runs_dir)
    request_id = config.submission.request
    if request_id:
        runs_dir = Path(config.job.runs_dir)
        # Whoever typed it may be gone meanwhile: with the connection, or its terminal.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A retry may come while the first try still submits.
        with request.alone(runs_dir, request_id):
            before = request.run_of(runs_dir, request_id)
            if before and _was_submitted(before, cluster):
                return before
            return _submit_new(config, cluster, mark)
    return _submit_new(config, cluster, mark)


def _was_submitted(run: RunDir, cluster: str) -> bool:
    """Returns whether the run of a request has a job: its submitter may have been killed before it
    could record the job. Without one, the run is removed."""
    job_id = run.job_id()
    if not job_id and cluster == "slurm":
        # A job that still waits has written nothing: only the queue knows it, by its script.
        job_id = commands.job_of_script(run.submitit)
    if not job_id:
        run.discard()
        return False
    if not run.read_job():
        cluster_launcher.note_job(
            run, cluster, job_id, cluster_launcher.location(cluster)
        )
    return True


def _submit_new(config: RunConfig, cluster: str, mark: str) -> RunDir:
    with shared_outputs.submitting(config):
        run = create(config, mark)
        try:
            with run.held():
                _submit_job(run.load_own_config(), run, cluster)
        except SlurmftError:
            run.discard()
            raise
        except OSError as error:  # a full disk
            _cancel_unrecorded(run, cluster)
            run.discard()
            raise run.unwritable(error) from None
        return run


def _cancel_unrecorded(run: RunDir, cluster: str) -> None:
    """Cancels the job of a run that could not be written to the end of the submission: nobody would
    know of it."""
    if cluster != "slurm":
        return
    with contextlib.suppress(SlurmftError):
        # Slurm may have taken the job before the disk was full: the queue knows it by its script.
        job_id = commands.job_of_script(run.submitit)
        if job_id:
            commands.cancel(job_id)


def create(config: RunConfig, mark: str = "") -> RunDir:
    """The run directory of a job, with the program's code in it; its name has `mark`. Of a failure,
    nothing is left."""
    from slurmft.programs import submission  # 8 ms, which a dry run does without

    code = submission.source(config)
    run = RunDir.create(config, mark)
    try:
        with run.held():
            submission.freeze(config, run, code)
    except SlurmftError:
        run.discard()
        raise
    except OSError as error:  # a full disk
        run.discard()
        raise run.unwritable(error) from None
    return run


def _submit_job(config: RunConfig, run: RunDir, cluster: str) -> str:
    """Submits the job of a run, and records it; returns its id."""
    launcher = cluster_launcher.get(cluster)
    where = cluster_launcher.location(cluster)  # before the job: see `note_job`
    with outside_of_jobs():
        job_id = launcher.submit(config, run)
    try:
        cluster_launcher.note_job(run, cluster, job_id, where)
    except OSError:
        # The job of a run that resumes records its id itself. A new run has no other record yet:
        # its user would be told of no job.
        if not config.submission.resumed:
            with contextlib.suppress(OSError, SlurmftError):
                launcher.cancel(job_id, run)
            raise
    if cluster == "slurm":
        commands.check_starts(job_id)
    return job_id


def submit_with(config: RunConfig, cluster: str, submission: Submission) -> RunDir:
    """Submits a job with its provenance; see `submit` and `provenance`."""
    return submit(dataclasses.replace(config, submission=submission), cluster)


def resume(run: RunDir, flags: dict[str, Any], submission: Submission) -> str:
    """Submits the job of a run again, with changed options of the job; returns its id. `submission`
    is what `provenance` returns.

    Raises:
        UsageError: the run has finished, or its job has not ended, or another process resumes it.
        NotOwnError: the run is another user's, or others can write it.
        SlurmftError: the job was refused. The run is as it was.
    """
    permissions.settle(run.load_own_config().job.share_with_group)
    if not os.access(run.path, os.W_OK):
        raise UsageError(
            f"you cannot write to the run {str(run.path)!r}", "its owner can resume it"
        )
    # By its descriptor: others may put another run in the place of the one that is checked.
    with run.held(), _alone(run):
        # Under the lock: another resume may just have changed it.
        resumes = run.load_own_config().submission.resumed
        job = run.read_job()
        current_job = None
        if job is not None:
            current_job = job.id
        if submission.request:
            is_repeated = bool(resumes) and resumes[-1].request == submission.request
            # It was submitted, and the answer was lost with the connection.
            if is_repeated and current_job and current_job != resumes[-1].job_before:
                return current_job
            submission = dataclasses.replace(submission, job_before=current_job)
        config, cluster = _resumed(run, flags)
        permissions.settle(config.job.share_with_group)
        first = config.submission
        all_resumes = [*first.resumed, submission]
        first = dataclasses.replace(first, resumed=all_resumes)
        config = dataclasses.replace(config, submission=first)
        config = dependency.settled(config, cluster, config.job.runs_dir)
        # All is written before the submission: the job may start at once, and reads it.
        with shared_outputs.submitting(config, run), _restored(run):
            run.make_folders()
            write_text(run.config, config.to_json())
            run.set_state("submitted", "resumed")  # before the job can say that it runs
            return _submit_job(config, run, cluster)


def show_resume(run: RunDir, flags: dict[str, Any]) -> str:
    """Returns the text of a dry run of `resume`; raises as it would. Of a run from elsewhere, its
    user has agreed to this dry run."""
    config, cluster = _resumed(run, flags, is_agreed=True)
    return dry_run.text(config, cluster, run)


def _resumed(
    run: RunDir, flags: dict[str, Any], is_agreed: bool = False
) -> tuple[RunConfig, str]:
    """Returns the configuration of a run that resumes, and its cluster."""
    # Another user's configuration would choose what this one submits: it is refused.
    old = run.load_own_config(is_agreed)
    frozen_code.check(run, old)
    _check_ended(run, moves="cluster" in flags)
    typed_names = list(flags)
    # What it waited for is over: Slurm may know those jobs no more.
    if run.attempt.exists():
        flags = dict.fromkeys(DEPENDENCIES, ()) | flags
    # What a requeue has asked for was needed.
    raised_mib = run.get_state().raised_mem_mib_since_submission
    if raised_mib is not None:
        flags = {"mem": f"{raised_mib}M"} | flags
    job = with_absolute_paths(old.job.replaced(flags))
    config = dataclasses.replace(old, job=job)
    cluster = check(config, run)
    warn_of_unread(config, cluster, typed_names, options(JobConfig))
    return config, cluster


def _alone(run: RunDir) -> contextlib.AbstractContextManager[Any]:
    """Lets only one process at a time check a run and submit it again. Where there are no locks,
    the second job ends when it starts (`attempts.check_turn`)."""
    try:
        return locks.hold(run.path / "resume.lock")
    except BlockingIOError as holder:
        raise UsageError(
            f"another slurmft resume of {run.path.name} is under way: {holder}",
            f"wait for it; then: slurmft status {shlex.quote(str(run.path))}",
        ) from None
    except OSError:  # no locks here, or a full disk
        return contextlib.nullcontext()


@contextlib.contextmanager
def _restored(run: RunDir) -> Iterator[None]:
    """Restores the files of a run that a submission changes, byte for byte, if it fails."""
    paths = (run.config, run.state, run.job)
    contents = {}
    for path in paths:
        if path.exists():
            contents[path] = read_bytes(path)
    try:
        yield
    except BaseException as error:
        # Not where an interruption came after the submission: its job waits, and is not lost.
        is_failure = isinstance(error, Exception)
        if is_failure or read_bytes(run.job) == contents[run.job]:
            for path, content in contents.items():
                # the error of the block is the one to read
                with contextlib.suppress(OSError):
                    write_bytes(path, content)
        raise


def _check_ended(run: RunDir, moves: bool) -> None:
    """Raises UsageError where the job of a run has not ended, or that is unknown, or the run has
    finished. With `moves` the user names a cluster: the run may then come here from elsewhere."""
    job = cluster_launcher.job_of(run)
    if run.get_state().state == "finished":
        hint = f"what it has left: slurmft status {shlex.quote(str(run.path))}"
        # Predictions and programs of the user's own have none.
        if run.model.is_dir():
            hint = f"its model: {run.model}"
        raise UsageError(f"the run {str(run.path)!r} has finished", hint)
    place = cluster_launcher.elsewhere(run)
    if place:
        # Nobody here can check it: whoever names a cluster takes the responsibility.
        if moves:
            return
        raise UsageError(
            f"the job {job.id} of {run.path.name} is {place}",
            f"resume it there; or here, if that job has certainly ended: --cluster {job.cluster}",
        )
    state = cluster_launcher.job_state(run, job)
    if state.has_left_queue:
        return
    if state.report == NO_ANSWER:
        reason = state.report.reason
        raise UsageError(
            f"whether the job {job.id} has ended is unknown: {reason}", "try later"
        )
    cure = f"slurmft cancel {shlex.quote(str(run.path))}"
    if state.name == "COMPLETING":
        cure = "its processes are ending: try again in some seconds"
    raise UsageError(f"the job {job.id} of this run is {state.name.lower()}", cure)
