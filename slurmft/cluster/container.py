"""`--container`: the task of a node in an Apptainer image.

Python, torch and the libraries are the image's; slurmft's code is that of the submitting side.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import slurmft
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.runs.rundir import RunDir

_CODE = "/opt/slurmft"
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")


def check(job: JobConfig, cluster: str) -> None:
    """Raises UsageError where the image cannot be used."""
    if job.container is None:
        return
    if cluster != "slurm":
        raise UsageError(
            f"--container {job.container!r} works under Slurm, not with --cluster {cluster}",
            "leave it out, or run this same command by: apptainer exec IMAGE ...",
        )
    if not Path(job.container).exists():  # an unpacked image is a folder
        raise UsageError(
            f"--container {job.container!r}: no such image",
            "make it once, on a file system of all nodes: apptainer pull image.sif docker://...",
        )


def node_task(config: RunConfig, run: RunDir) -> list[str]:
    """The command of a node's task; with --container, the one that runs it in the container."""
    image, task = config.job.container, ["-u", "-m", "slurmft.node.task", str(run.path)]
    if image is None:
        return [sys.executable, *task]
    command = ["apptainer", "exec", "--mount", bind(package(), f"{_CODE}/slurmft", "ro")]
    for folder in folders(config, run):
        command += ["--mount", bind(folder, folder)]
    if asks_for_gpus(config.job):
        command.append("--nv")
    return [*command, "--env", f"PYTHONPATH={_CODE}", image, "python3", *task]


def asks_for_gpus(job: JobConfig) -> bool:
    """Whether a job requests GPUs, by any option of sbatch."""
    options = (pair.lstrip("-") for pair in job.sbatch)
    others = any(o.startswith("gpus") or (o.startswith("gres") and "gpu" in o) for o in options)
    return bool(job.gpus_per_node) or job.profile == "gpu" or others


def package() -> str:
    """The folder of slurmft's code."""
    return str(Path(slurmft.__file__).parent)


def folders(config: RunConfig, run: RunDir) -> list[str]:
    """What the task reads and writes: the run directory, data and model, caches. Apptainer itself
    mounts the home directory, /tmp and the current folder."""
    sources = [str(run.path), *config.program.paths]
    absolute = [path for path in sources if os.path.isabs(path)]
    return list(dict.fromkeys([*absolute, *caches()]))


def caches() -> list[str]:
    """The folders of the Hugging Face caches that the environment names; they need not exist."""
    named = [os.environ.get(name, "") for name in _CACHES]
    return list(dict.fromkeys(path for path in named if os.path.isabs(path)))


def bind(source: str, destination: str, option: str = "") -> str:
    """The value of Apptainer's --mount: CSV, which unlike --bind takes any path."""
    fields = ["type=bind", f"source={source}", f"destination={destination}", option]
    quoted = [f'"{f.replace(chr(34), 2 * chr(34))}"' if set(f) & set(',"') else f for f in fields]
    return ",".join(field for field in quoted if field)
