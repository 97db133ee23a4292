"""What to run (`TrainConfig`) and where (`JobConfig`).

Both are written to the run directory once, on the login node; compute nodes, requeues and reports
read only that. Every field is a flag of `slurmft submit` and a key of the site file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurmft import credentials
from slurmft.errors import UsageError, unknown
from slurmft.filesystem import LOCK_PRIMITIVES
from slurmft.recipes import RECIPES, TASKS, fill, named, presets

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
BACKENDS = ("auto", "gloo", "nccl", "ccl", "mpi")
BATCHINGS = ("packed", "grouped", "dynamic", "padded")
GRAD_COMMS = ("auto", "fp32", "bf16", "powersgd")
"""Besides local:K."""
OPTIMIZERS = ("adamw", "muon", "auto")
LR_RULES = ("none", "sqrt", "linear")
LR_SCHEDULES = ("linear", "cosine", "constant")
PROFILES = ("auto", "gpu", "xeon", "cpu")
CLUSTERS = ("auto", "slurm", "local", "mpirun")
TRACKERS = ("tensorboard", "wandb", "mlflow")
DIALECTS = ("auto", "intel", "openmpi")


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    **extra: Any,
) -> Any:
    """A dataclass field that is a command-line option too.

    Args:
        default: the value where neither the recipe, the site file nor a flag gives one.
        help: one line for `--help`.
        metavar: what the value is called there.
        choices: the values allowed.
        extra: `sbatch="KEY"`: the sbatch option that carries this field's value.
    """
    return field(
        default=default, metadata={"help": help, "metavar": metavar, "choices": choices, **extra}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What to train; see `resolve`, which fills in what the recipe has."""

    task: str = option("synthetic", "what to train", choices=tuple(TASKS))
    recipe: str | None = option(
        None,
        f"a task with all its settings, most as published: {', '.join(named())}",
        metavar="NAME",
    )
    as_published: bool = option(
        False, "the recipe exactly as it was published, also where that loses accuracy"
    )
    preset: str | None = option(
        None, "variety of the task: synthetic has quick and paper, squad has v1 and v2"
    )
    model: str | None = option(None, "hub id or local folder of the model", metavar="ID|DIR")
    data: str | None = option(
        None,
        "hub id, or folder with train and validation as .jsonl, .csv or .parquet",
        metavar="ID|DIR",
    )
    text_column: str | None = option(None, "column that holds the text", metavar="NAME")
    text_pair_column: str | None = option(
        None, "column that holds the second text of a pair", metavar="NAME"
    )
    label_column: str | None = option(None, "column that holds the label", metavar="NAME")
    max_length: int | None = option(None, "tokens kept of each text", metavar="TOKENS")
    doc_stride: int | None = option(
        None, "tokens that neighbouring windows of a long text share (squad)", metavar="TOKENS"
    )
    epochs: int | None = option(None, "passes over the training data")
    max_steps: int | None = option(None, "stop after this many optimizer steps", metavar="STEPS")
    batch_size: int | None = option(None, "training samples a process and micro-step")
    eval_batch_size: int | None = option(None, "evaluation samples a process and step")
    gradient_accumulation_steps: int = option(
        1, "micro-steps an optimizer step; global batch = processes x batch size x this"
    )
    optimizer: str = option(
        "adamw",
        "muon takes few steps far (AdamW for embeddings and head); auto: muon where the global "
        "batch is above --reference-batch-size, else adamw",
        choices=OPTIMIZERS,
    )
    learning_rate: float | None = option(None, "peak learning rate")
    muon_learning_rate: float | None = option(
        None,
        "peak learning rate of Muon, and of the head beside it; embeddings, norms and biases keep "
        "--learning-rate (default: the same)",
    )
    lr_rule: str = option(
        "none",
        "growth of the learning rate with the global batch, above --reference-batch-size",
        choices=LR_RULES,
    )
    reference_batch_size: int | None = option(
        None,
        "largest global batch for which the learning rate and AdamW are right as they are",
        metavar="SAMPLES",
    )
    max_global_batch_size: int | None = option(
        None,
        "samples of an optimizer step at most: where processes, batch size and accumulation make "
        "more, each takes fewer",
        metavar="SAMPLES",
    )
    lr_schedule: str = option("linear", "decay after the warm-up", choices=LR_SCHEDULES)
    warmup_steps: int | None = option(None, "warm-up in optimizer steps (overrides the ratio)")
    warmup_ratio: float | None = option(None, "warm-up as a fraction of all optimizer steps")
    weight_decay: float = option(0.01, "weight decay; biases and norms have none")
    max_grad_norm: float = option(1.0, "clip the gradient's norm to this; 0 does not clip")
    precision: str = option(
        "auto",
        "auto: bf16 where the hardware computes it natively, else fp16 on GPUs, fp32 on CPUs",
        choices=PRECISIONS,
    )
    backend: str = option(
        "auto",
        "collectives: auto is nccl on GPUs; on CPUs ccl where oneCCL is installed, else gloo",
        choices=BACKENDS,
    )
    batching: str = option(
        "packed",
        "padding: none (packed), none and near lengths in a batch (grouped), to the longest of the "
        "batch (dynamic), to --max-length (padded)",
        choices=BATCHINGS,
    )
    grad_comm: str = option(
        "auto",
        "what ranks send each other: gradients as fp32, rounded to bf16, compressed (powersgd), or "
        "their averaged weights every K steps (local:K); auto: fp32, or bf16 where a bf16 run "
        "gains by it",
        metavar="auto|fp32|bf16|powersgd|local:K",
    )
    activation_checkpointing: bool = option(
        False, "compute layers again in the backward pass rather than keep what they computed"
    )
    ipex: bool = option(False, "use intel-extension-for-pytorch, on CPUs")
    dropout: float | None = option(
        None, "dropout everywhere in the model (default: the model's own)"
    )
    seed: int = option(42, "seed of weights, dropout and data order")
    checkpoint_every: str = option(
        "10m", "time between checkpoints: 90s, 10m, 2h; 0: none by time", metavar="TIME"
    )
    checkpoint_every_steps: int | None = option(
        None, "optimizer steps between checkpoints, besides", metavar="STEPS"
    )
    keep_checkpoints: int = option(2, "newest checkpoints kept, besides the best one")
    early_stopping: int | None = option(
        None,
        "end after this many evaluations in a row without a new best",
        metavar="EVALUATIONS",
    )
    metric_gather: str = option(
        "memory",
        "how predictions reach the main process: memory, or evaluate's files in the run directory",
        choices=("memory", "files"),
    )
    log_every: int = option(10, "optimizer steps between progress records", metavar="STEPS")

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_credentials(self)
        if self.recipe is not None and self.recipe not in RECIPES:
            raise unknown("--recipe", self.recipe, list(RECIPES))
        if self.preset is not None and self.preset not in presets(self.task):
            raise unknown(f"preset of task {self.task}", self.preset, presets(self.task))
        for name in ("epochs", "max_steps", "batch_size", "eval_batch_size", "max_length"):
            _check(self, name, lambda v: v >= 1, "at least 1")
        for name in ("reference_batch_size", "max_global_batch_size"):
            _check(self, name, lambda v: v >= 1, "at least 1")
        _check_optimizer(self)
        for name in ("gradient_accumulation_steps", "log_every", "keep_checkpoints"):
            _check(self, name, lambda v: v >= 1, "at least 1")
        _check(self, "doc_stride", lambda v: v >= 0, "0 or more")
        _check(self, "doc_stride", lambda v: v < (self.max_length or v + 1), "below --max-length")
        _check(self, "early_stopping", lambda v: v >= 1, "at least 1")
        _check(self, "checkpoint_every_steps", lambda v: v >= 1, "at least 1")
        duration_s(self.checkpoint_every, "--checkpoint-every")
        local_steps(self.grad_comm)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "seed"):
            _check(self, name, lambda v: v >= 0, "0 or more")
        _check(self, "seed", lambda v: v < 2**32, "below 2^32")
        for name in ("learning_rate", "muon_learning_rate"):
            _check(self, name, lambda v: v > 0, "above 0")
        _check(self, "warmup_ratio", lambda v: 0 <= v <= 1, "between 0 and 1")
        _check(self, "dropout", lambda v: 0 <= v < 1, "0 or more and below 1")

    @classmethod
    def resolve(cls, **given: Any) -> TrainConfig:
        """The values that are given, over those of the recipe that they name or imply."""
        return build(cls, fill(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Where to run it: the cluster, its nodes, and what Slurm is asked for."""

    nodes: int = option(1, "nodes; one Slurm task and one torchrun on each", sbatch="nodes")
    nproc_per_node: int | None = option(
        None, "processes a node (default: one a GPU; without GPUs one a CPU socket)"
    )
    profile: str = option(
        "auto",
        "use of a node: auto finds out there; gpu; xeon (Intel's OpenMP, NUMA nodes); cpu",
        choices=PROFILES,
    )
    comm_cores: int | None = option(
        None, "cores of each process that oneCCL's threads get (default: 1 of 8, at most 4)"
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
    runs_dir: str = option("runs", "folder for run directories, seen by every node", metavar="DIR")
    share_with_group: bool = option(
        False, "let the run directory's group read it (default: nobody but you)"
    )
    job_name: str = option("slurmft", "name of the Slurm job", sbatch="job-name", metavar="NAME")
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
        None, "Apptainer image in which each node's task runs; under Slurm", metavar="FILE"
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

    stop_lead_s: int = option(
        120,
        "stop, save and requeue this long before the time limit (at most a third of --time)",
        metavar="SECONDS",
    )
    file_locks: str = option(
        "auto",
        "locks of the Hugging Face caches: auto takes what holds between the nodes there",
        choices=("auto", *LOCK_PRIMITIVES),
    )
    requeue: bool = option(True, "queue the job again after a stop or a node's death, to go on")
    max_requeues: int = option(
        3, "give up after this many requeues without a new checkpoint in between"
    )
    max_restarts: int = option(3, "restarts of all ranks within a job, after one of them died")
    hang_timeout_s: int = option(
        600,
        "a rank that does no step for so long hangs (longer if steps are long); 0: never",
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_credentials(self)
        _check(self, "comm_cores", lambda v: v >= 0, "0 or more")
        for name in ("stop_lead_s", "max_requeues", "max_restarts", "hang_timeout_s"):
            _check(self, name, lambda v: v >= 0, "0 or more")
        for name in ("nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "rdzv_timeout_s"):
            _check(self, name, lambda v: v >= 1, "at least 1")
        if self.time is not None:
            time_limit_min(self.time)
        if self.hostfile is not None and self.cluster != "mpirun":
            raise UsageError(
                f"--hostfile {self.hostfile!r} is for --cluster mpirun, not {self.cluster}",
                "Slurm chooses the hosts by itself; add --cluster mpirun, or leave the file out",
            )
        _check(self, "stage_dir", lambda v: v.startswith("/"), "an absolute path")
        for name in self.trackers:
            if name not in TRACKERS:
                raise unknown("--log-with", name, list(TRACKERS))
        for name, value in _strings(self):
            _check_one_line(name, value)
        for pair in self.sbatch:
            _check_sbatch_pair(self, pair)
        _check_runs_dir(self.runs_dir)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `log_with`, each once."""
        names = (name.strip() for text in self.log_with for name in text.split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def lead_s(self) -> int:
        """Seconds from the stop signal to the time limit."""
        if self.time is None:
            return self.stop_lead_s
        return min(self.stop_lead_s, time_limit_min(self.time) * 60 // 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole of config.json: what to run, where, and who asked for it."""

    train: TrainConfig
    job: JobConfig
    submission: dict[str, Any] = field(default_factory=dict)
    """When, where, by whom and from which code the run was submitted (`dispatch.provenance`)."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        raw: dict[str, Any] = json.loads(text)
        job = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["job"].items()}
        return cls(
            train=build(TrainConfig, raw["train"]),
            job=build(JobConfig, job),
            submission=raw["submission"],
        )


def flag(name: str) -> str:
    """The command-line spelling of a field: batch_size -> --batch-size."""
    return "--" + name.replace("_", "-")


Config = TypeVar("Config", TrainConfig, JobConfig)


def options(config: type[TrainConfig] | type[JobConfig]) -> dict[str, dataclasses.Field[Any]]:
    """Name -> field of every option of a configuration."""
    return {f.name: f for f in dataclasses.fields(config)}


def build(config: type[Config], values: dict[str, Any]) -> Config:
    """A configuration from those of `values` that are its fields."""
    return config(**{k: v for k, v in values.items() if k in options(config)})


def value_type(option: dataclasses.Field[Any]) -> type:
    """The type of one value of an option: `int` for `int | None`, `str` for `tuple[str, ...]`."""
    name = re.split(r"[\[\] |,]+", str(option.type))  # annotations are strings in this module
    return {"int": int, "float": float, "str": str, "bool": bool}[
        name[1] if name[0] == "tuple" else name[0]
    ]


def is_repeatable(option: dataclasses.Field[Any]) -> bool:
    return str(option.type).startswith("tuple")


_UNLIMITED_MIN = 60 * 24 * 365
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def time_limit_min(text: str) -> int:
    """A Slurm time limit in minutes, rounded up: "90", "30:00", "1:30:00", "2-12", "2-12:00:00".

    Raises:
        UsageError: the text is none of sbatch's forms, or is no time at all.
    """
    if text.lower() in ("infinite", "unlimited"):
        return _UNLIMITED_MIN
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise UsageError(f"--time {text!r} is no time limit", "use minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (None if g is None else int(g) for g in match.groups())
    if days is not None:  # D-HH[:MM[:SS]]
        seconds = days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:  # HH:MM:SS
        seconds = (first or 0) * 3600 + (second or 0) * 60 + third
    else:  # MM[:SS]
        seconds = (first or 0) * 60 + (second or 0)
    if seconds == 0:
        raise UsageError(f"--time {text!r} leaves no time to run", "give at least one minute")
    return math.ceil(seconds / 60)


def duration_s(text: str, what: str) -> float:
    """Seconds of "90s", "10m", "2h", "3d", or of a bare number.

    Raises:
        UsageError: the text is no duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"{what} {text!r} is no duration", "write it as 90s, 10m, 2h or 3d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def local_steps(grad_comm: str) -> int | None:
    """K of local:K: steps of each rank by itself; None where ranks send gradients.

    Raises:
        UsageError: the text is none of the forms that --grad-comm has.
    """
    if grad_comm in GRAD_COMMS:
        return None
    match = re.fullmatch(r"local:(\d+)", grad_comm)
    if not match:
        raise unknown("--grad-comm", grad_comm, [*GRAD_COMMS, "local:16"])
    if int(match[1]) < 2:
        raise UsageError(
            f"--grad-comm {grad_comm} leaves no steps between averages", "give local:2 or more"
        )
    return int(match[1])


def _check(config: Any, name: str, good: Callable[[Any], bool], what: str) -> None:
    value = getattr(config, name)
    if value is not None and not good(value):
        raise UsageError(f"{flag(name)} {value} must be {what}")


def _check_choices(config: TrainConfig | JobConfig) -> None:
    for name, option in options(type(config)).items():
        choices = option.metadata["choices"]
        if choices and getattr(config, name) not in choices:
            raise unknown(flag(name), getattr(config, name), list(choices))


def _check_optimizer(train: TrainConfig) -> None:
    """Options that need, or rule out, each other."""
    for name, plain in (("optimizer", ("adamw", "muon")), ("lr_rule", ("none",))):
        value = getattr(train, name)
        if value not in plain and train.reference_batch_size is None:
            raise UsageError(
                f"{flag(name)} {value} needs the global batch that --learning-rate is right for",
                "add --reference-batch-size",
            )
    if train.ipex and train.optimizer != "adamw":
        raise UsageError(
            f"--ipex knows no Muon, which --optimizer {train.optimizer} needs",
            "add --optimizer adamw, or leave --ipex out",
        )


def _strings(config: TrainConfig | JobConfig) -> list[tuple[str, str]]:
    """Every text of a configuration, with its field: what ends up in files, and those of a job in
    shell lines and sbatch directives."""
    found = []
    for name in options(type(config)):
        value = getattr(config, name)
        found += [
            (name, v)
            for v in (value if isinstance(value, tuple) else (value,))
            if isinstance(v, str)
        ]
    return found


def _check_credentials(config: TrainConfig | JobConfig) -> None:
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
            f"{flag(name)} {value!r} holds a line break", "an sbatch script takes one line a value"
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
        raise UsageError(f"--sbatch {pair!r} is no KEY=VALUE", 'write it as --sbatch "nice=100"')
    if key in _RESERVED:
        raise UsageError(f"--sbatch {pair!r}: slurmft sets {key} itself", "leave it out")
    for name, option in options(JobConfig).items():
        given = getattr(job, name) not in (None, False)
        if option.metadata.get("sbatch") == key and given:
            raise UsageError(f"--sbatch {pair!r} contradicts {flag(name)}", "give one of the two")
