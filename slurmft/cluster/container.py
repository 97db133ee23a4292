"""`--container`: the task of a node in a container, see containers.toml.

Python, torch and the libraries are the image's; slurmft's code is that of the submitting side. On
a node, `python -m slurmft.cluster.container RUN_DIR COMMAND...` runs the runtime's command.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import slurmft
from slurmft.cluster.slurm import commands
from slurmft.core import process
from slurmft.core.config import JobConfig, RunConfig, image_kind
from slurmft.core.errors import SlurmftError, UsageError, run_main
from slurmft.core.run_files import Failure
from slurmft.node import signals
from slurmft.node.hardware import host_name
from slurmft.runs.rundir import RunDir

_CODE = "/opt/slurmft"
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")


@functools.cache
def runtimes() -> dict[str, dict[str, Any]]:
    """Name -> what is told to a runtime; see containers.toml."""
    import tomllib  # 5 ms: only jobs in containers pay for it

    return tomllib.loads(Path(__file__).with_name("containers.toml").read_text(encoding="utf-8"))


def runtime_of(job: JobConfig) -> str:
    """The name of a job's container runtime; `auto` is the first that this machine has, or a
    UsageError."""
    if job.container_runtime != "auto":
        return job.container_runtime
    for name, runtime in runtimes().items():
        if any(map(shutil.which, runtime["programs"])):
            return name
        with contextlib.suppress(SlurmftError):
            if not runtime["programs"] and "container-image" in commands.call("srun", "--help"):
                return name
    raise UsageError(
        f"--container {job.container!r}: no apptainer, singularity, ch-run or podman on the PATH, "
        "and srun has no --container-image (Pyxis)",
        "load its module, or name the one that the nodes have: --container-runtime podman",
    )


def check(job: JobConfig, cluster: str) -> None:
    """Raises UsageError where the image cannot be used."""
    if job.container is None:
        return
    if cluster != "slurm":
        raise UsageError(
            f"--container {job.container!r} works under Slurm, not with --cluster {cluster}",
            "leave it out, or run this same command by: apptainer exec IMAGE ...",
        )
    runtime, kind = runtimes()[runtime_of(job)], image_kind(job.container)
    hint = f"make it once, on a file system of all nodes: {runtime['make']}"
    if kind != "registry" and not Path(job.container).exists():
        raise UsageError(f"--container {job.container!r}: no such image", hint)
    if kind not in runtime["images"]:
        what = f"{runtime_of(job)} cannot run an image of the kind {kind!r}"
        raise UsageError(f"--container {job.container!r}: {what}", hint)


def node_task(config: RunConfig, run: RunDir) -> list[str]:
    """The command of a node's task; with --container, in the container, if srun has
    `srun_options`."""
    task = ["-u", "-m", "slurmft.node.task", str(run.path)]
    if config.job.container is None:
        return [sys.executable, *task]
    task = ["env", f"PYTHONPATH={_CODE}", f"HOME={Path.home()}", "python3", *task]
    programs = runtimes()[runtime_of(config.job)]["programs"]
    if not programs:
        return task
    program = next(filter(shutil.which, programs), programs[0])
    enter = [sys.executable, "-m", "slurmft.cluster.container", str(run.path), program]
    return [*enter, *_options(config, run), *task]


def srun_options(config: RunConfig, run: RunDir) -> list[str]:
    """The options of the srun that starts `node_task`, where it runs the container itself."""
    if config.job.container is None or runtimes()[runtime_of(config.job)]["programs"]:
        return []
    return _options(config, run)


def _options(config: RunConfig, run: RunDir) -> list[str]:
    """What a runtime is told, up to the program."""
    job, image = config.job, config.job.container or ""
    runtime, shown = runtimes()[runtime_of(job)], mounts(config, run)
    words = runtime["options"] + (runtime["gpus"] if asks_for_gpus(job) else [])
    words += runtime["user"] if os.getuid() else []
    values = {"here": os.getcwd(), "image": image, "mounts": ",".join(map(":".join, shown))}
    told = [word.format(**values) for word in words]
    for source, place, *option in shown:
        each = {"source": source, "place": place, "csv": as_csv(source, place, *option)}
        told += [word.format(**each) for word in runtime["mount"]]
    return told + [word.format(**values) for word in runtime[image_kind(image)]]


def asks_for_gpus(job: JobConfig) -> bool:
    """Whether a job requests GPUs, by any option of sbatch."""
    options = (pair.lstrip("-") for pair in job.sbatch)
    others = any(o.startswith("gpus") or (o.startswith("gres") and "gpu" in o) for o in options)
    return bool(job.gpus_per_node) or job.profile == "gpu" or others


def mounts(config: RunConfig, run: RunDir) -> list[tuple[str, ...]]:
    """Source, place and option of each mount: slurmft's code, and what the task reads and writes,
    unless the runtime shows that by itself. None is within another. UsageError where the runtime
    cannot be told such a path."""
    name, image = runtime_of(config.job), config.job.container or ""
    here = [os.getcwd(), str(Path.home())] if name != "apptainer" else []
    named = [p if os.path.isdir(p) else os.path.dirname(p) for p in (*config.program.paths, *here)]
    outer = {p for p in (*named, str(run.path.parent), *caches()) if os.path.isabs(p) and p != "/"}
    every = outer | set(runtimes()[name]["shows"])
    shown = [p for p in outer if not any(Path(p).is_relative_to(o) for o in every - {p})]
    code = str(Path(slurmft.__file__).parent)
    for path in (code, *shown, *([] if image_kind(image) == "registry" else [image])):
        if wrong := set(runtimes()[name]["separators"]) & set(path):
            what = f"{name} takes no path with {min(wrong)!r}: {path!r}"
            raise UsageError(what, "rename it, or choose another --container-runtime")
    return [(code, f"{_CODE}/slurmft", "ro"), *((path, path) for path in sorted(shown))]


def folders_to_make(config: RunConfig, run: RunDir) -> list[str]:
    """Folders that must be there before the tasks start: caches, and in an image that is a folder
    those that Charliecloud mounts over."""
    if (image := config.job.container) is None:
        return []
    places = mounts(config, run) if runtime_of(config.job) == "charliecloud" else []
    return caches() + [image + place for _, place, *_ in places if image_kind(image) == "folder"]


def caches() -> list[str]:
    """The folders of the Hugging Face caches that the environment names; they need not exist."""
    named = [os.environ.get(name, "") for name in _CACHES]
    return list(dict.fromkeys(path for path in named if os.path.isabs(path)))


def as_csv(source: str, place: str, option: str = "") -> str:
    """The value of --mount, for Apptainer and Podman."""
    fields = ["type=bind", f"source={source}", f"destination={place}", option]
    quoted = [f'"{f.replace(chr(34), 2 * chr(34))}"' if set(f) & set(',"') else f for f in fields]
    return ",".join(field for field in quoted if field)


def main(argv: list[str]) -> int:
    """Runs the runtime's command. Stop signals are for the task: blocked, they kill no helper
    process (conmon, squashfuse)."""
    run, program = RunDir.open(argv[0]), argv[1]
    if shutil.which(program) is None:
        missing = SlurmftError(
            f"--container: there is no {program} on this node",
            "load its module by --setup, or choose another --container-runtime",
        )
        run.add(Failure.of(f"node {host_name()}", missing))
        raise missing
    signals.block()
    if program == "podman":
        return _run_detached(argv[1:])
    os.execvp(program, argv[1:])


def _run_detached(command: list[str]) -> int:
    """Runs a container of Podman; returns its exit code. Podman itself, if not detached, would end
    at SIGTERM, with code 0. Its monitor, conmon, ends with the container, and with its code."""
    process.adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pid")
        code = subprocess.run([*command[:2], f"--conmon-pidfile={file}", *command[2:]]).returncode
        if code or not file.exists():  # a stop signal came before the container
            return code or 128 + signal.SIGTERM
        code = os.waitstatus_to_exitcode(os.waitpid(int(file.read_text()), 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
