"""`--container`: the task of a node in a container, see containers.toml.

Python, torch and the libraries are the image's; slurmft's code is that of the submitting side. On
a node, `slurmft.node.container` runs the command that is made here.
"""

import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import slurmft
from slurmft.cluster.slurm import commands
from slurmft.core import interpreter
from slurmft.core.config import JobConfig, RunConfig, image_kind
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.runs.rundir import RunDir

_CODE = "/opt/slurmft"
"""Where slurmft's code is mounted in a container."""
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")


@functools.cache
def runtimes() -> dict[str, dict[str, Any]]:
    """Returns the options of each container runtime, by its name; see containers.toml."""
    import tomllib  # 5 ms: only jobs in containers pay for it

    file = Path(__file__).with_name("containers.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def runtime_of(job: JobConfig) -> str:
    """Returns the name of a job's container runtime; `auto` is the first that this machine has.
    UsageError where it has none."""
    if job.container_runtime != "auto":
        return job.container_runtime
    for name, runtime in runtimes().items():
        if runtime["programs"]:
            is_here = any(map(shutil.which, runtime["programs"]))
        else:
            is_here = _srun_runs_containers()
        if is_here:
            return name
    raise UsageError(
        f"--container {job.container!r}: no apptainer, singularity, ch-run or podman on the PATH, "
        "and srun has no --container-image (Pyxis)",
        "load its module, or name the one that the nodes have: --container-runtime podman",
    )


def _srun_runs_containers() -> bool:
    """Returns whether srun has Pyxis, a plug-in that adds options to it."""
    try:
        return "container-image" in commands.call("srun", "--help")
    except SlurmftError:  # there is no Slurm here
        return False


def check(job: JobConfig, cluster: str) -> None:
    """Raises UsageError where the image cannot be used."""
    if job.container is None:
        return
    if cluster != "slurm":
        raise UsageError(
            f"--container {job.container!r} works under Slurm, not with --cluster {cluster}",
            "leave it out, or run this same command by: apptainer exec IMAGE ...",
        )
    name = runtime_of(job)
    runtime = runtimes()[name]
    kind = image_kind(job.container)
    hint = f"make it once, on a file system of all nodes: {runtime['make']}"
    if kind != "registry" and not Path(job.container).exists():
        raise UsageError(f"--container {job.container!r}: no such image", hint)
    if kind not in runtime["images"]:
        what = f"{name} cannot run an image of the kind {kind!r}"
        raise UsageError(f"--container {job.container!r}: {what}", hint)


def node_task(config: RunConfig, run: RunDir) -> list[str]:
    """Returns the command of a node's task; with --container, in the container, if srun has
    `srun_options`."""
    task = interpreter.module("slurmft.node.task", str(run.path), unbuffered=True)
    if config.job.container is None:
        return task
    home = Path.home()
    # The image's own Python, as that of this host need not run there. It finds slurmft's code where
    # `mounts` puts it.
    task = ["env", f"PYTHONPATH={_CODE}", f"HOME={home}", "python3", *task[1:]]
    programs = runtimes()[runtime_of(config.job)]["programs"]
    # Pyxis: srun starts it in the container already.
    if not programs:
        return task
    # None may be on this machine: the nodes have it, perhaps by a module that --setup loads.
    program = next(filter(shutil.which, programs), programs[0])
    enter = interpreter.module("slurmft.node.container", str(run.path), program)
    return [*enter, *_options(config, run), *task]


def srun_options(config: RunConfig, run: RunDir) -> list[str]:
    """Returns the options of the srun that starts `node_task`, where srun runs the container."""
    if config.job.container is None:
        return []
    # A runtime with a program of its own is started by the task: see `node_task`.
    if runtimes()[runtime_of(config.job)]["programs"]:
        return []
    return _options(config, run)


def _options(config: RunConfig, run: RunDir) -> list[str]:
    """Returns the arguments of a runtime, up to the program."""
    image = config.job.container or ""
    runtime = runtimes()[runtime_of(config.job)]
    mounted = mounts(config, run)
    # `list` copies: the templates are extended, and those of `runtimes` are cached.
    templates = list(runtime["options"])
    if asks_for_gpus(config.job):
        templates += runtime["gpus"]
    if os.getuid() != 0:
        templates += runtime["user"]
    mount_list = ",".join(":".join(mount) for mount in mounted)
    values = {"here": os.getcwd(), "image": image, "mounts": mount_list}
    arguments = [template.format(**values) for template in templates]
    for source, place, *option in mounted:
        # A template takes the parts, or all of them as fields of CSV.
        csv = as_csv(source, place, *option)
        fields = {"source": source, "place": place, "csv": csv}
        arguments += [template.format(**fields) for template in runtime["mount"]]
    # At the end, which names the image: the command comes behind it.
    kind = image_kind(image)
    arguments += [template.format(**values) for template in runtime[kind]]
    return arguments


def asks_for_gpus(job: JobConfig) -> bool:
    """Returns whether a job requests GPUs, by any option of sbatch."""
    if job.gpus_per_node or job.profile == "gpu":
        return True
    for pair in job.sbatch:
        option = pair.lstrip("-")
        # gpus, gpus-per-task, ...; gres=gpu:a100:4.
        is_gpu_resource = option.startswith("gres") and "gpu" in option
        if option.startswith("gpus") or is_gpu_resource:
            return True
    return False


def mounts(config: RunConfig, run: RunDir) -> list[tuple[str, ...]]:
    """Returns source, place and option of each mount: slurmft's code, and what the task reads and
    writes, unless the runtime mounts that by itself. None is within another. UsageError where the
    runtime cannot take such a path."""
    name = runtime_of(config.job)
    runtime = runtimes()[name]
    image = config.job.container or ""
    code = str(Path(slurmft.__file__).parent)
    used_folders = _used_folders(config, run, name)
    folders = _outermost(used_folders, runtime["shows"])
    paths = [code, *folders]
    if image_kind(image) != "registry":
        paths.append(image)
    for path in paths:
        # Characters that end a path in the runtime's own list of mounts.
        forbidden = set(runtime["separators"]) & set(path)
        if forbidden:
            what = f"{name} takes no path with {min(forbidden)!r}: {path!r}"
            raise UsageError(what, "rename it, or choose another --container-runtime")
    same_places = [(folder, folder) for folder in sorted(folders)]
    # Read-only: nothing that runs in the image changes the code that other nodes run as well.
    return [(code, f"{_CODE}/slurmft", "ro"), *same_places]


def _used_folders(config: RunConfig, run: RunDir, runtime: str) -> set[str]:
    """Returns the folders that a task reads and writes."""
    # The program's own paths: its code, its environment, what it reads.
    paths = list(config.program.paths)
    # Apptainer mounts these by itself.
    if runtime != "apptainer":
        paths += [os.getcwd(), str(Path.home())]
    folders = [str(run.path.parent), *caches()]
    for path in paths:
        if not os.path.isdir(path):
            path = os.path.dirname(path)
        folders.append(path)
    # Not /, under which the image itself would disappear.
    return {folder for folder in folders if os.path.isabs(folder) and folder != "/"}


def _outermost(folders: set[str], mounted: Sequence[str]) -> list[str]:
    """Returns the folders that are within no other folder, and within none that is mounted."""
    candidates = folders | set(mounted)
    outermost = []
    for folder in folders:
        others = candidates - {folder}
        path = Path(folder)
        is_within = any(path.is_relative_to(other) for other in others)
        if not is_within:
            outermost.append(folder)
    return outermost


def folders_to_make(config: RunConfig, run: RunDir) -> list[str]:
    """Returns the folders that must be there before the tasks start: caches, and in an image that
    is a folder those that Charliecloud mounts over."""
    image = config.job.container
    if image is None:
        return []
    folders = caches()
    if runtime_of(config.job) == "charliecloud" and image_kind(image) == "folder":
        # It mounts over folders that exist, and makes none in an image that is a folder.
        for _, place, *_ in mounts(config, run):
            folders.append(image + place)
    return folders


def caches() -> list[str]:
    """Returns the folders of the Hugging Face caches that the environment names; they need not
    exist."""
    folders = []
    for name in _CACHES:
        path = os.environ.get(name, "")
        # A relative one would be another folder in each process.
        if os.path.isabs(path) and path not in folders:
            folders.append(path)
    return folders


def as_csv(source: str, place: str, option: str = "") -> str:
    """Returns the value of --mount, for Apptainer and Podman."""
    fields = ["type=bind", f"source={source}", f"destination={place}", option]
    return ",".join(_quoted(field) for field in fields if field)


def _quoted(field: str) -> str:
    """Quotes a field as CSV does, where it needs that."""
    if set(field).isdisjoint(',"'):
        return field
    doubled = field.replace('"', '""')
    return f'"{doubled}"'
