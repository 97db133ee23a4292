"""The environment of a user's own program, on the login node: `--env`, and the checks of
`--accelerate-config` that need no torch."""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slurmft.core import (
    descent,
    fingerprint,
    interpreter,
    ownership,
    permissions,
    process,
    trusted,
    writers,
)
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute
from slurmft.programs.description import OwnProgram

ENVIRONMENTS = trusted.Door(
    "the environments of `--env uv`",
    "`RUNS_DIR/.envs-UID/`",
    "the packages that a program imports",
    cure="submit anew, with another folder for runs: --runs-dir",
)
_UV_FOLDER = re.compile(r"\.envs-\d+(-[0-9a-f]{8})?")
"""Names of the folders that `Door.place` makes for environments."""
_ERROR_CHARACTERS = 300
"""Characters of uv's output that a message has."""
_DECIDED_BY_JOB = re.compile(
    r"num_(machines|processes)|machine_rank|main_|rdzv|gpu_ids|mpirun|.*affinity"
)
"""Keys of Accelerate's file whose values the job decides."""


def folder(env: str, start: Path, job: JobConfig, make: bool) -> str:
    """Returns the folder of --env.

    Args:
        start: the project of `--env uv` is this folder, or one above.
        make: whether to make an environment of uv that is not there yet.

    Raises:
        UsageError: there is no such environment, or it cannot be made.
    """
    if env == "uv":
        return str(_uv_environment(start, job, make))
    python = absolute(env) / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise UsageError(
            f"--env {env!r} is not an environment: there is no {str(python)!r}",
            "give the folder of a virtual or conda environment; or uv, for a project with uv.lock",
        )
    return str(absolute(env))


def _uv_environment(start: Path, job: JobConfig, make: bool) -> Path:
    """Returns the environment of a uv.lock: one for equal contents, and of this user alone."""
    project = _uv_project(start)
    if not (project / "uv.lock").is_file():
        raise UsageError(
            f"--env uv: no uv.lock in {str(project)!r}", "make it there: uv lock"
        )
    # A part of the key: another Python needs another environment.
    python = _run_uv(project, ["python", "find", "--system"]).stdout.strip()
    kept = Path(job.runs_dir, f".envs-{os.getuid()}")
    if make:
        permissions.make_above(kept)
        # Not where another user has been first. One of this user's that is open is refused below.
        kept = ENVIRONMENTS.place(kept, 0, job.share_with_group)
    environment = kept / _uv_key(project, python)
    if not make:
        return environment
    with ENVIRONMENTS.folder(kept) as descriptor:
        ENVIRONMENTS.check_place(kept, Path(f"/proc/self/fd/{descriptor}"))
        if not environment.exists():
            print(
                f"slurmft: uv sync of {project} to {environment}",
                file=sys.stderr,
                flush=True,
            )
        # --frozen: the lock file is taken as it is, and not brought up to date.
        sync = ["sync", "--frozen"]
        if python:
            sync += ["--python", python]
        # It does nothing where the environment is whole.
        done = _run_uv(project, sync, UV_PROJECT_ENVIRONMENT=str(environment))
    if done.returncode:
        # The error is at the end; what stands before is progress.
        last = " ".join(done.stderr.split())[-_ERROR_CHARACTERS:]
        raise UsageError(f"--env uv: uv sync failed: {last}", "try: uv sync --frozen")
    return environment


def _uv_project(start: Path) -> Path:
    """Returns the nearest folder with a pyproject.toml, as uv itself chooses; `start` where there
    is none.

    Raises:
        NotOwnError: another user has made the project, or may change how uv reads it.
    """
    project = start
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file():
            project = folder
            break
    _check_uv_project(project, start)
    return project


def _check_uv_project(project: Path, start: Path) -> None:
    cure = "take a copy of the project into a folder of yours, and submit there"
    owner_of: Callable[[Path], str] = trusted.other_owner
    # Whoever works in a project of a colleague's names it so; one above was only come upon.
    if project == start:
        owner_of = trusted.planted_by
    for name in ("pyproject.toml", "uv.lock"):
        other = owner_of(project / name)
        if other:
            path = str(project / name)
            raise trusted.NotOwnError(f"--env uv: {path!r} belongs to {other}", cure)
    # uv reads .python-version and uv.toml there, too.
    status = ownership.status(project)
    if status.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(status.st_mode)
        problem = f"everybody can write {str(project)!r} (mode {mode:o})"
        raise trusted.NotOwnError(f"--env uv: {problem}", cure)


def _others_write_above(folder: Path) -> bool:
    """Returns whether another user may make files in one of the folders above."""

    def check(above: Path, status: os.stat_result) -> None:
        if writers.can_others_make(above, status):
            raise PermissionError

    try:
        descent.examine_way(folder, check, includes_end=False)
    except PermissionError:  # another user's link, too
        return True
    return False


def check_uv_environment(environment: Path) -> None:
    """Checks, before each start, that an environment of `--env uv` is one that slurmft has made:
    since the submission, others may have put theirs in its place.

    Raises:
        NotOwnError: it is another user's, or may be.
    """
    folder = environment.parent
    if not _UV_FOLDER.fullmatch(folder.name):  # one that the user has named
        return
    with contextlib.suppress(FileNotFoundError):  # whoever starts its Python says so
        with ENVIRONMENTS.folder(folder) as descriptor:
            ENVIRONMENTS.check_place(folder, Path(f"/proc/self/fd/{descriptor}"))
        with ENVIRONMENTS.folder(environment / "bin"):
            pass


def _run_uv(
    project: Path, words: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    uv = shutil.which("uv") or shutil.which(
        "uv", path=os.path.dirname(interpreter.PYTHON)
    )
    if uv is None:
        raise UsageError("--env uv: there is no uv on the PATH", "pip install uv")
    environment = interpreter.environment_without_path(dict(os.environ))
    # uv warns of an active environment that is not the project's.
    environment.pop("VIRTUAL_ENV", None)
    place = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # uv looks in all folders above for workspaces with a lock of theirs, caches, indexes and
        # Pythons. Above a descriptor there is nothing that a user may write.
        if _others_write_above(project):
            opened = trusted.for_children(Path(f"/proc/self/fd/{place}"))
            words = ["--project", opened, *words]
        return process.run(
            [uv, *words],
            None,
            cwd=project,
            env=environment | variables,
            # Packages are code: nobody else's to write, whatever the umask of the user is.
            umask=permissions.current_umask() | 0o022,
        )
    finally:
        os.close(place)


def _uv_key(project: Path, python: str) -> str:
    """Returns a name for an environment, from all that it is made of."""
    # By contents, not by path or time: equal checkouts share one environment.
    lock = (project / "uv.lock").read_bytes()
    settings = (project / "pyproject.toml").read_bytes()
    # A lock that refers to files of the project's folder is of that folder alone.
    refers_to_folder = re.search(rb"source = \{ (editable|directory|path) =", lock)
    place = str(project) if refers_to_folder else ""
    uv_variables = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("UV_"):  # they change what uv installs, and from where
            uv_variables.append((name, value))
    content = repr((lock, settings, python, uv_variables, place))
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def check_accelerate(own: OwnProgram) -> None:
    """Checks --accelerate-config, and prints the values of it that do not count.

    Raises:
        UsageError: there is no such file, or it needs a package that is not installed.
    """
    import yaml  # for this flag alone

    option = f"--accelerate-config {own.accelerate_config!r}"
    hint = "make one: accelerate config"
    try:
        values = yaml.safe_load(
            Path(own.accelerate_config or "").read_text(encoding="utf-8")
        )
        distributed_type = str(values["distributed_type"]).upper()
    except OSError as error:
        raise UsageError(f"{option}: {error.strerror}", hint) from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())  # YAML's errors have several lines
        raise UsageError(
            f"{option} is no YAML with a distributed_type: {reason}", hint
        ) from None
    # Looked up in the program's own environment, which may lack what slurmft's has.
    required = ["accelerate"]
    if distributed_type == "DEEPSPEED":
        required.append("deepspeed")
    installed = fingerprint.packages(own.python)
    missing = []
    if installed:  # empty where that cannot be found out
        missing = [name for name in required if name not in installed]
    if missing:
        raise UsageError(
            f"{option} needs {missing[0]}, which {own.python!r} lacks",
            f"{own.python} -m pip install {missing[0]}",
        )
    # Said, and not refused: `accelerate config` writes some of these keys by itself.
    ignored = [
        key for key, value in values.items() if value and _DECIDED_BY_JOB.match(key)
    ]
    if ignored:
        print(
            f"slurmft: {option}: the job decides, not that file: {', '.join(ignored)}",
            file=sys.stderr,
        )
