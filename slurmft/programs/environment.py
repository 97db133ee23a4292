"""The environment of a user's own program, on the login node: `--env`, and what can be seen of
`--accelerate-config` without importing torch."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from slurmft.core import fingerprint, permissions
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute
from slurmft.programs.description import OwnProgram

_JOBS_OWN = re.compile(
    r"num_(machines|processes)|machine_rank|main_|rdzv|gpu_ids|mpirun|.*affinity"
)
"""Keys of Accelerate's file that say what the job decides."""


def folder(env: str, near: Path, job: JobConfig, make: bool) -> str:
    """The folder of --env; UsageError where there is none, or it cannot be made. The project of
    `--env uv` is `near` or above; `make` makes what is not there yet."""
    if env == "uv":
        return str(_of_lock(near, job, make))
    if not os.access(python := absolute(env) / "bin" / "python", os.X_OK):
        raise UsageError(
            f"--env {env!r} is not an environment: there is no {str(python)!r}",
            "give the folder of a virtual or conda environment; or uv, for a project with uv.lock",
        )
    return str(absolute(env))


def _of_lock(near: Path, job: JobConfig, make: bool) -> Path:
    """The environment of a uv.lock: one for equal contents, and of this user alone."""
    project = next((p for p in (near, *near.parents) if (p / "pyproject.toml").is_file()), near)
    if not (project / "uv.lock").is_file():
        raise UsageError(f"--env uv: no uv.lock in {str(project)!r}", "make it there: uv lock")
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    if uv is None:
        raise UsageError("--env uv: there is no uv on the PATH", "pip install uv")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        more = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"} | variables
        return subprocess.run([uv, *words], cwd=project, env=more, capture_output=True, text=True)

    python = run("python", "find", "--system").stdout.strip()
    lock, settings = ((project / name).read_bytes() for name in ("uv.lock", "pyproject.toml"))
    refers = re.search(rb"source = \{ (editable|directory|path) =", lock)  # to files of this folder
    given = sorted(pair for pair in os.environ.items() if pair[0].startswith("UV_"))
    content = repr((lock, settings, python, given, str(project) if refers else ""))
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    made = Path(job.runs_dir, f".envs-{os.getuid()}", key)
    if make:
        permissions.make_folder(made.parent, job.share_with_group, exist_ok=True)
        with permissions.own_folder(made.parent):
            if not made.exists():
                print(f"slurmft: uv sync of {project} to {made}", file=sys.stderr, flush=True)
            words = ["sync", "--frozen", *(["--python", python] if python else [])]
            done = run(*words, UV_PROJECT_ENVIRONMENT=str(made))  # nothing, where it is whole
        if done.returncode:
            last = " ".join(done.stderr.split())[-300:]
            raise UsageError(f"--env uv: uv sync failed: {last}", "try: uv sync --frozen")
    return made


def check_accelerate(own: OwnProgram) -> None:
    """Checks --accelerate-config, and says what of it does not count. UsageError where there is no
    such file, or it needs what is not installed."""
    import yaml  # for this flag alone

    what, make = f"--accelerate-config {own.accelerate_config!r}", "make one: accelerate config"
    try:
        values = yaml.safe_load(Path(own.accelerate_config or "").read_text(encoding="utf-8"))
        kind = str(values["distributed_type"]).upper()
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", make) from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())  # of YAML, several lines
        raise UsageError(f"{what} is no YAML with a distributed_type: {why}", make) from None
    installed = fingerprint.packages(own.python)
    needed = ["accelerate", *(["deepspeed"] if kind == "DEEPSPEED" else [])]
    if missing := [name for name in needed if installed and name not in installed]:
        pip = f"{own.python} -m pip install {missing[0]}"
        raise UsageError(f"{what} needs {missing[0]}, which {own.python!r} lacks", pip)
    if ignored := ", ".join(k for k, v in values.items() if v and _JOBS_OWN.match(k)):
        print(f"slurmft: {what}: the job decides, not that file: {ignored}", file=sys.stderr)
