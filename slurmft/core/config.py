"""Options, and the configuration of a job: what runs, where, and who asked for it.

It is written to the run directory once, on the login node; compute nodes, requeues and reports read
only that. Every field of `JobConfig` is a flag of `slurmft submit` and a key of the site file.
"""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from slurmft.core import credentials
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import fits
from slurmft.core.filesystem import LOCK_PRIMITIVES, absolute
from slurmft.core.program import Program

BACKENDS = ("auto", "gloo", "nccl", "ccl")
PROFILES = ("auto", "gpu", "xeon", "cpu")
CLUSTERS = ("auto", "slurm", "local", "mpirun")
TRACKERS = (
    "tensorboard", "wandb", "mlflow", "trackio", "aim", "comet_ml", "clearml", "dvclive", "swanlab",
)  # fmt: skip
"""As Accelerate calls them, and Python their packages."""
RUNTIMES = ("auto", "apptainer", "pyxis", "charliecloud", "podman")
DIALECTS = ("auto", "intel", "openmpi")


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    **extra: Any,
) -> Any:
    """A dataclass field that is a command-line option too; `help` is one line for `--help`. Of
    `extra`, `sbatch="KEY"` is the sbatch option that carries this field's value."""
    return field(
        default=default, metadata={"help": help, "metavar": metavar, "choices": choices, **extra}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Where to run it: the cluster, its nodes, and what Slurm is asked for."""

    name: str | None = option(
        None, "what the run is called: the first part of its directory's name", metavar="NAME"
    )
    nodes: int = option(1, "nodes; one Slurm task and one torchrun on each", sbatch="nodes")
    nproc_per_node: int | None = option(
        None, "processes a node (default: one a GPU; without GPUs one a CPU socket)"
    )
    profile: str = option(
        "auto",
        "how a node is used: gpu, xeon (Intel's OpenMP, NUMA nodes), cpu; auto: found out there",
        choices=PROFILES,
    )
    cluster: str = option(
        "auto",
        "auto: Slurm where sbatch is on the PATH, else simulated nodes on this machine; mpirun: "
        "the hosts of --hostfile",
        choices=CLUSTERS,
    )
    hostfile: str | None = option(
        None, "hosts for --cluster mpirun, a line each; the first --nodes of them", metavar="FILE"
    )
    dialect: str = option(
        "auto",
        "mpirun's: intel (also MPICH), openmpi; auto: which of the two is on the PATH",
        choices=DIALECTS,
    )
    backend: str = option(
        "auto",
        "collectives: auto is nccl on GPUs; on CPUs ccl where oneCCL is installed, else gloo",
        choices=BACKENDS,
    )
    runs_dir: str = option(
        "runs", "folder for run directories, which every node sees", metavar="DIR"
    )
    share_with_group: bool = option(
        False, "let the run directory's group read it (default: nobody but you)"
    )
    job_name: str | None = option(
        None,
        "name of the Slurm job (default: --name, else slurmft)",
        sbatch="job-name",
        metavar="NAME",
    )
    partition: str | None = option(None, "Slurm partition", sbatch="partition", metavar="NAME")
    account: str | None = option(None, "Slurm account", sbatch="account", metavar="NAME")
    qos: str | None = option(None, "Slurm quality of service", sbatch="qos", metavar="NAME")
    time: str | None = option(
        None,
        "time limit as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH:MM:SS",
        sbatch="time",
        metavar="TIME",
    )
    gpus_per_node: int | None = option(None, "GPUs a node", sbatch="gpus-per-node")
    cpus_per_task: int | None = option(
        None, "CPUs a node's task, for all its processes", sbatch="cpus-per-task"
    )
    mem: str | None = option(None, "memory a node, such as 64G", sbatch="mem", metavar="SIZE")
    constraint: str | None = option(None, "node features", sbatch="constraint", metavar="EXPR")
    exclusive: bool = option(False, "share the nodes with no other job", sbatch="exclusive")
    reservation: str | None = option(
        None, "Slurm reservation", sbatch="reservation", metavar="NAME"
    )
    comment: str | None = option(None, "comment kept by Slurm", sbatch="comment", metavar="TEXT")
    sbatch: tuple[str, ...] = option((), "any other sbatch option; repeatable", metavar="KEY=VALUE")
    setup: tuple[str, ...] = option(
        (),
        'shell line that runs before the job, such as "module load cuda"; repeatable',
        metavar="LINE",
    )
    container: str | None = option(
        None,
        "image to run each node's task in: a path or docker://...; under Slurm",
        metavar="IMAGE",
    )
    container_runtime: str = option(
        "auto", "what runs the image; auto: the first of these that is here", choices=RUNTIMES
    )
    stage_env: bool = option(
        False, "copy the Python environment to the nodes' own disks first; under Slurm"
    )
    stage_dir: str | None = option(
        None,
        "folder on the nodes' own disks for --stage-env (default: $SLURM_TMPDIR, $TMPDIR, /tmp)",
        metavar="DIR",
    )
    log_with: tuple[str, ...] = option(
        (),
        f"trackers, with commas or repeatable: {', '.join(TRACKERS)}",
        metavar="NAME",
    )
    host_suffix: str = option(
        "", "appended to host names for the rendezvous, where the fabric's names differ, as n1-ib0"
    )
    interface: str | None = option(
        None,
        "network interface of the collectives (default: the one that routes to the head)",
        metavar="NAME",
    )
    rdzv_timeout_s: int = option(
        45, "how long a node tries to resolve and reach the head node", metavar="SECONDS"
    )
    preflight: str = option(
        "auto",
        "examine all nodes before the program starts, and go on without bad ones; auto: from 8 "
        "nodes on; under Slurm",
        choices=("auto", "on", "off"),
    )

    stop_lead_s: int | None = option(
        None,
        "stop, save and requeue this long before the time limit (default: 120, at most a third "
        "of --time)",
        metavar="SECONDS",
    )
    file_locks: str = option(
        "auto",
        "file locks of the Hugging Face caches; auto: the kind that holds between nodes there",
        choices=("auto", *LOCK_PRIMITIVES),
    )
    after: tuple[str, ...] = option(
        (), "start when this run has finished; under Slurm; repeatable", metavar="RUN"
    )
    after_any: tuple[str, ...] = option(
        (), "the same, however that run ends; repeatable", metavar="RUN"
    )
    requeue: bool = option(True, "queue the job again after a stop or a node failure, to resume")
    strict: bool = option(
        False, "do not start if code, data, model or packages have changed since the submission"
    )
    notify: tuple[str, ...] = option(
        (),
        "tell of the end, a failure, a hang: file:PATH or env:NAME, which have URLs of apprise's; "
        "or such a URL without a secret; repeatable",
        metavar="WHERE",
    )
    notify_command: str | None = option(
        None, "the same by a shell command, which reads the message on stdin", metavar="COMMAND"
    )
    max_requeues: int = option(
        3, "give up after this many requeues without a new checkpoint in between"
    )
    max_restarts: int = option(3, "restarts of all ranks within a job, after one of them failed")
    hang_timeout_s: int = option(
        600,
        "a rank without a step for so long counts as hung; after some steps of the built-in "
        "training 10 times the slowest of the last, from 60 s on; 0: never",
        metavar="SECONDS",
    )

    checkpoint_every: str = option(
        "10m", "time between checkpoints: 90s, 10m, 2h; 0: none by time", metavar="TIME"
    )
    checkpoint_every_steps: int | None = option(
        None, "optimizer steps between checkpoints, besides", metavar="STEPS"
    )
    keep_checkpoints: int = option(2, "newest checkpoints kept, besides the best one")

    def __post_init__(self) -> None:
        check_choices(self)
        check_credentials(self)
        for name in ("checkpoint_every_steps", "keep_checkpoints"):
            check_value(self, name, lambda v: v >= 1, "at least 1")
        duration_s(self.checkpoint_every, "--checkpoint-every")
        for name in ("stop_lead_s", "max_requeues", "max_restarts", "hang_timeout_s"):
            check_value(self, name, lambda v: v >= 0, "0 or more")
        for name in ("nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "rdzv_timeout_s"):
            check_value(self, name, lambda v: v >= 1, "at least 1")
        if self.time is not None and time_limit_min(self.time) * 60 <= (self.stop_lead_s or 0):
            raise UsageError(
                f"--stop-lead-s {self.stop_lead_s} leaves nothing of --time {self.time} to run",
                "give more --time, or a shorter --stop-lead-s: at least what a save takes",
            )
        if self.hostfile is not None and self.cluster != "mpirun":
            raise UsageError(
                f"--hostfile {self.hostfile!r} is for --cluster mpirun, not {self.cluster}",
                "Slurm chooses the hosts by itself; add --cluster mpirun, or leave the file out",
            )
        if self.preflight == "on" and self.cluster == "mpirun":
            raise UsageError("--preflight on is not for --cluster mpirun", "leave it out")
        check_value(self, "stage_dir", lambda v: v.startswith("/"), "an absolute path")
        _check_run_name(self.name)
        for name in self.trackers:
            if name not in TRACKERS:
                raise unknown("--log-with", name, list(TRACKERS))
        for name, value in _strings(self):
            _check_one_line(name, value)
        for pair in self.sbatch:
            _check_sbatch_pair(self, pair)
        _check_runs_dir(self.runs_dir)

    @property
    def project(self) -> str:
        """What Slurm and trackers call the job."""
        return self.job_name or self.name or "slurmft"

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `log_with`, each once."""
        names = (name.strip() for text in self.log_with for name in text.split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between checkpoints; 0: none is due by time."""
        return duration_s(self.checkpoint_every, "--checkpoint-every")

    @property
    def lead_s(self) -> int:
        """Seconds from the stop signal to the time limit."""
        if self.stop_lead_s is not None:
            return self.stop_lead_s
        return min(LEAD_S, time_limit_min(self.time or "unlimited") * 60 // 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole of config.json: what to run, where, and who asked for it."""

    program: Program
    job: JobConfig
    submission: dict[str, Any] = field(default_factory=dict)
    """When, where, by whom and from which code the run was submitted (`slurmft.cluster.submit`)."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def name(self) -> str:
        """What begins the name of the run's directory: --name, or what its program does."""
        return self.job.name or self.program.name

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        raw: dict[str, Any] = json.loads(text)
        if not fits(raw, {"program": dict, "job": dict, "submission": dict}):
            raise TypeError("it is not the configuration of a run")
        return cls(
            program=Program.from_json(raw["program"]),
            job=build(JobConfig, raw["job"]),
            submission=raw["submission"],
        )


STAMP = re.compile(r"-(\d{8}-\d{6})-")
"""In the name of a run's directory: when it was submitted."""


def _check_run_name(name: str | None) -> None:
    """Raises UsageError where a name of a run could be taken for something else."""
    if name is None or (
        re.fullmatch(r"[A-Za-z][\w.-]{0,63}", name, re.ASCII)
        and name != "last"
        and not STAMP.search(f"{name}-")
    ):
        return
    safe = re.sub(r"[^\w.-]+", "-", STAMP.split(f"{name}-")[0], flags=re.ASCII).strip("-._")
    raise UsageError(
        f"--name {name!r} cannot be the name of a run",
        "give a letter, then at most 63 letters, digits, hyphens, underscores and dots, not 'last'"
        + (f": --name {safe}" if re.fullmatch(r"(?!last$)[A-Za-z].{0,63}", safe) else ""),
    )


def flag(name: str) -> str:
    """The command-line spelling of a field: batch_size -> --batch-size."""
    return "--" + name.replace("_", "-")


Config = TypeVar("Config")


def options(config: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Name -> field of every option of a configuration."""
    return {f.name: f for f in dataclasses.fields(config)}


def build(config: type[Config], values: dict[str, Any]) -> Config:
    """A configuration from those of `values` that are its fields; UsageError where one cannot be
    right."""
    known = options(config)
    return config(**{k: checked(known[k], value) for k, value in values.items() if k in known})


WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
"""Types of options, in words."""


def checked(option: dataclasses.Field[Any], value: Any) -> Any:
    """A value of an option, as its field has it; UsageError where it is of another type."""
    kind, what = value_type(option), WORDS[value_type(option)]
    if is_repeatable(option):
        if isinstance(value, (list, tuple)) and all(type(v) is kind for v in value):
            return tuple(value)
        what = "a list of strings"
    elif type(value) is kind or (value is None and option.default is None):
        return value
    elif kind is float and type(value) is int:
        return float(value)
    raise UsageError(f"{option.name} must be {what}, not {value!r}")


_PATHS = ("runs_dir", "hostfile", "container")
"""Options of a job that are paths: it may start in another folder."""


def with_absolute_paths(job: JobConfig) -> JobConfig:
    given = {name: getattr(job, name) for name in _PATHS}
    paths: dict[str, Any] = {k: str(absolute(v)) for k, v in given.items() if v is not None}
    paths["notify"] = tuple(
        re.sub("^file:(.+)", lambda found: f"file:{absolute(found[1])}", n) for n in job.notify
    )
    if image_kind(job.container or "") == "registry":
        del paths["container"]
    return dataclasses.replace(job, **paths)


_IN_REGISTRY = re.compile(r"[\w+.-]+:/.+|([\w@-]+([.:][\w-]+)+|localhost)[/#].+")


def image_kind(image: str) -> str:
    """What an image is, by its name: registry (docker://ubuntu, nvcr.io#nvidia/torch:1), folder or
    file."""
    if _IN_REGISTRY.fullmatch(image) and not Path(image).exists():
        return "registry"
    return "folder" if Path(image).is_dir() else "file"


def value_type(option: dataclasses.Field[Any]) -> type:
    """The type of one value of an option: `int` for `int | None`, `str` for `tuple[str, ...]`."""
    found: type = (get_args(option.type) or (option.type,))[0]
    return found


def is_repeatable(option: dataclasses.Field[Any]) -> bool:
    return get_origin(option.type) is tuple


LEAD_S = 120
"""Seconds from the stop signal to the time limit, where neither flag nor time says otherwise."""
_UNLIMITED_MIN = 60 * 24 * 365
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def time_limit_min(text: str) -> int:
    """A Slurm time limit in minutes, rounded up: "90", "30:00", "1:30:00", "2-12", "2-12:00:00".

    Raises:
        UsageError: it has none of sbatch's forms, or is zero.
    """
    if text.lower() in ("infinite", "unlimited"):
        return _UNLIMITED_MIN
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise UsageError(f"invalid time limit: --time {text!r}", "use M, HH:MM:SS or D-HH:MM:SS")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)  # D-HH[:MM[:SS]], MM[:SS]
    seconds = 86400 * int(days or 0)
    seconds += sum(part * unit for part, unit in zip(parts, units, strict=False))
    if seconds == 0:
        raise UsageError(f"--time {text!r} leaves no time to run", "give at least one minute")
    return math.ceil(seconds / 60)


def duration_s(text: str, what: str) -> float:
    """Seconds of "90s", "10m", "2h", "3d", or of a bare number; UsageError for all else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"{what} {text!r} is not a duration", "write it as 90s, 10m, 2h or 3d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def check_value(config: Any, name: str, good: Callable[[Any], bool], what: str) -> None:
    value = getattr(config, name)
    if value is not None and not good(value):
        raise UsageError(f"{flag(name)} {value} must be {what}")


def check_choices(config: Any) -> None:
    for name, option in options(type(config)).items():
        choices, value = option.metadata.get("choices"), getattr(config, name)
        if choices and value is not None and value not in choices:
            raise unknown(flag(name), value, list(choices))


def _strings(config: Any) -> list[tuple[str, str]]:
    """Every text of a configuration, with its field: what ends up in files, and those of a job in
    shell lines and sbatch directives."""
    values = ((name, getattr(config, name)) for name in options(type(config)))
    several = ((name, v if isinstance(v, tuple) else (v,)) for name, v in values)
    return [(name, v) for name, own in several for v in own if isinstance(v, str)]


def check_credentials(config: Any) -> None:
    for name, value in _strings(config):
        if kind := credentials.kind_in(value):
            raise UsageError(
                f"{flag(name)} {credentials.redact(value)!r} holds {kind}: everybody who sees the "
                "run's files or this machine's processes would read it",
                "put it into the environment, which the job inherits (export HF_TOKEN=...), or log "
                "in once: hf auth login; and revoke it, if others use this machine",
            )


def _check_one_line(name: str, value: str) -> None:
    if any(c in value for c in "\n\r\0"):
        raise UsageError(
            f"{flag(name)} {value!r} holds a line break",
            "values are one line in sbatch scripts",
        )


def _check_runs_dir(path: str) -> None:
    if found := re.search(r"%\w|%%|\\", path):
        raise UsageError(
            f"--runs-dir {path!r} holds {found[0]!r}, which Slurm replaces in file names",
            "give a folder without it",
        )


_RESERVED = (
    "ntasks", "ntasks-per-node", "output", "error", "open-mode", "array", "requeue", "signal",
    "parsable", "quiet", "wait", "test-only", "wrap", "clusters",
)  # fmt: skip
"""sbatch options on which slurmft's own working depends."""


def _check_sbatch_pair(job: JobConfig, pair: str) -> None:
    key = pair.partition("=")[0].lstrip("-")
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]+", key):
        raise UsageError(f"--sbatch {pair!r} is not KEY=VALUE", 'write it as --sbatch "nice=100"')
    if key in _RESERVED:
        raise UsageError(f"--sbatch {pair!r}: slurmft sets {key} itself", "leave it out")
    for name, option in options(JobConfig).items():
        given = getattr(job, name) not in (None, False)
        if option.metadata.get("sbatch") == key and given:
            raise UsageError(f"--sbatch {pair!r} contradicts {flag(name)}", "give one of the two")
