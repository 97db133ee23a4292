"""The configuration of a job: what runs, where, and who asked for it.

It is written to the run directory once, on the login node; compute nodes, requeues and reports read
only that. Every field of `JobConfig` is a flag of `slurmft submit` and a key of the site file.
"""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from slurmft.core import trusted
from slurmft.core.decode import decode_leniently, loads
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import LOCK_PRIMITIVES, absolute
from slurmft.core.options import (
    DAY_S,
    MOST_STEPS,
    YEAR_S,
    Command,
    Config,
    Needs,
    build,
    build_own,
    check_credentials,
    check_lines,
    check_options,
    from_plugins,
    option,
    options,
    own_options,
)
from slurmft.core.plugins import JOB_OPTIONS
from slurmft.core.program import Program
from slurmft.core.run_files import Submission

BACKENDS = ("auto", "gloo", "nccl", "ccl")
PROFILES = ("auto", "gpu", "xeon", "cpu")
RUNTIMES = ("auto", "apptainer", "pyxis", "charliecloud", "podman")

_CPU_KEYS = {
    "cpus-per-gpu",
    "cpus-per-task",
    "mincpus",
    "exclusive",
    "cores-per-socket",
    "sockets-per-node",
    "threads-per-core",
    "extra-node-info",
}
"""sbatch options that decide how many CPUs of a node a job gets."""

_SLURM = (Needs("cluster", ("slurm",)),)
"""The rule of options that Slurm alone reads."""
_ALL_OF_DOCTOR: tuple[Command, ...] = ("doctor", "doctor node", "doctor locks")
"""Commands that examine nodes: they have the flags that say which nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Where to run it: the cluster, its nodes, and what Slurm is asked for."""

    # --- the run, its nodes, and how each is used

    name: str | None = option(
        None,
        "name of the run: the first part of its directory's name",
        affects="nothing",
        at="submission",
        metavar="NAME",
        usual=True,
        may_be_empty=True,  # it is no name, and its own check says what would be one
        identifies=True,
        elsewhere=("run_name",),
    )
    nodes: int = option(
        1,
        "number of nodes; each has one Slurm task and one torchrun. MIN-MAX: what Slurm has free",
        # Every process adds a batch of its own to a step: more of them train otherwise.
        affects="both",
        at="job",
        metavar="N|MIN-MAX",
        least=1,
        most=65_536,  # Slurm's MAX_SLURM_NODES; it cuts larger numbers to 32 bits, and takes them
        lower="min_nodes",
        counts="devices",
        usual=True,
        sbatch="nodes",
        commands=("doctor", "render"),
        elsewhere=(
            "num_machines",
            "nnodes",
            "N",
        ),
    )
    min_nodes: int | None = option(
        None,
        "fewest nodes that will do: --nodes 2-8 is --nodes 8 --min-nodes 2",
        # The global batch is that of --nodes, whatever their number is.
        affects="speed",
        at="job",
        least=1,
        below="nodes",
        # It compares numbers of nodes.
        varies=False,
    )
    spare_nodes: int = option(
        0,
        "further nodes, which wait to take the place of nodes that fail",
        affects="nothing",
        at="job",
        metavar="N",
        least=0,
        most=65_536,
        needs=(Needs("requeue", (True,), why="a job that starts once needs none"),),
        read_with=_SLURM,
    )
    nproc_per_node: int | None = option(
        None,
        "processes a node (default: one a GPU; without GPUs one a CPU socket)",
        affects="both",
        at="node",
        least=1,
        most=4_096,
        counts="devices",
        published=("processes_per_node",),
        commands=("doctor", "doctor node", "render"),
        elsewhere=(
            "num_processes",
            "devices",
            "nproc",
            "nprocs",
            "ppn",
            "ntasks_per_node",
        ),
    )
    profile: str = option(
        "auto",
        "how to use a node: gpu, xeon (Intel's OpenMP, NUMA nodes) or cpu; auto: by its hardware",
        affects="speed",
        at="node",
        choices=PROFILES,
        commands=("doctor", "doctor node", "render"),
    )
    cluster: str = option(
        "auto",
        "what runs the job; auto: Slurm where sbatch is on the PATH, else simulated nodes on this "
        "machine; or another launcher",
        affects="speed",
        at="submission",
        metavar="auto|slurm|local|LAUNCHER",
        varies=False,
        commands=("doctor",),
    )
    backend: str = option(
        "auto",
        "library of the collectives; auto: nccl on GPUs; on CPUs gloo, or ccl where oneCCL is "
        "installed on all nodes and measured to be faster there",
        affects="speed",
        at="rank",
        choices=BACKENDS,
        commands=("doctor", "doctor node", "render"),
        elsewhere=("ddp_backend",),
    )
    # --- files, on the login node and on all others

    runs_dir: str = option(
        "runs",
        "folder for run directories; every node sees it",
        affects="nothing",
        at="submission",
        metavar="DIR",
        path="output",
        identifies=True,
        commands=("doctor",),
        elsewhere=("output_dir",),
    )
    share_with_group: bool = option(
        False,
        "let the run directory's group read it (default: nobody but you)",
        affects="nothing",
        at="submission",
        commands=("render",),
    )
    # --- what Slurm is asked for

    job_name: str | None = option(
        None,
        "name of the Slurm job (default: --name, else slurmft)",
        affects="nothing",
        at="job",
        metavar="NAME",
        varies=False,
        sbatch="job-name",
        elsewhere=("J",),
    )
    partition: str | None = option(
        None,
        "Slurm partition",
        affects="speed",
        at="job",
        metavar="NAME",
        usual=True,
        read_with=_SLURM,
        sbatch="partition",
        scontrol="Partition",
        commands=_ALL_OF_DOCTOR,
        elsewhere=("p",),
    )
    account: str | None = option(
        None,
        "Slurm account",
        # Who pays, and how soon the job starts, change no measurement.
        affects="nothing",
        at="job",
        metavar="NAME",
        usual=True,
        read_with=_SLURM,
        sbatch="account",
        scontrol="Account",
        commands=_ALL_OF_DOCTOR,
        elsewhere=("A",),
    )
    qos: str | None = option(
        None,
        "Slurm quality of service",
        # As the account: it sets priority and limits of a job, not what the job computes.
        affects="nothing",
        at="job",
        metavar="NAME",
        read_with=_SLURM,
        sbatch="qos",
        scontrol="QOS",
        commands=_ALL_OF_DOCTOR,
        elsewhere=("q",),
    )
    time: str | None = option(
        None,
        "time limit as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH:MM:SS",
        # It decides whether a run finishes in one job, not what it measures.
        affects="nothing",
        at="job",
        metavar="TIME",
        usual=True,
        sbatch="time",
        scontrol="TimeLimit",
        commands=_ALL_OF_DOCTOR,
        elsewhere=(
            "t",
            "time_limit",
        ),
    )
    gpus_per_node: int | None = option(
        None,
        "GPUs a node",
        # Each has a process, where --nproc-per-node does not say otherwise.
        affects="both",
        at="job",
        least=1,
        most=1_024,
        counts="devices",
        usual=True,
        read_with=_SLURM,
        sbatch="gpus-per-node",
        commands=("doctor",),
        elsewhere=(
            "gpus",
            "gpu",
            "num_gpus",
            "gres",
            "gpus_per_task",
        ),
    )
    cpus_per_task: int | None = option(
        None,
        "CPUs of a node's task, for all its processes",
        affects="speed",
        at="job",
        least=1,
        most=65_533,  # Slurm has 16 bits for it, cuts larger numbers, and takes them
        usual=True,
        read_with=_SLURM,
        sbatch="cpus-per-task",
        commands=("doctor",),
        elsewhere=(
            "c",
            "cpus",
        ),
    )
    mem: str | None = option(
        None,
        "memory a node, such as 64G",
        # A run has enough, or it ends.
        affects="nothing",
        at="job",
        metavar="SIZE",
        usual=True,
        read_with=_SLURM,
        sbatch="mem",
        scontrol="MinMemoryNode",
        commands=("doctor",),
        elsewhere=("mem_per_cpu",),
    )
    max_mem: str | None = option(
        None,
        "most memory a node that a requeue asks for: it asks once for 1.5 times --mem, where that "
        "was too small",
        affects="nothing",
        at="node",
        metavar="SIZE",
        needs=(Needs("mem"),),
        read_with=(Needs("requeue", (True,)),),
    )
    constraint: str | None = option(
        None,
        "node features",
        affects="speed",
        at="job",
        metavar="EXPR",
        read_with=_SLURM,
        sbatch="constraint",
        scontrol="Features",
        commands=_ALL_OF_DOCTOR,
        elsewhere=("C",),
    )
    exclusive: bool = option(
        False,
        "share the nodes with no other job",
        # Other jobs on a node compete for its memory bandwidth, its caches and its network.
        affects="speed",
        at="job",
        read_with=_SLURM,
        sbatch="exclusive",
    )
    reservation: str | None = option(
        None,
        "Slurm reservation",
        affects="nothing",
        at="job",
        metavar="NAME",
        read_with=_SLURM,
        sbatch="reservation",
        scontrol="Reservation",
        commands=_ALL_OF_DOCTOR,
    )
    comment: str | None = option(
        None,
        "comment that Slurm keeps",
        affects="nothing",
        at="job",
        metavar="TEXT",
        may_be_empty=True,
        read_with=_SLURM,
        sbatch="comment",
    )
    sbatch: tuple[str, ...] = option(
        (),
        "any other sbatch option; repeatable",
        # Such as --sbatch switches=1, or a node list: nobody knows, so it counts.
        affects="speed",
        at="job",
        metavar="KEY=VALUE",
        executes=True,  # some name files that Slurm executes, or writes
        read_with=_SLURM,
        takes_flags=True,
    )
    setup: tuple[str, ...] = option(
        (),
        'shell line to run before the job: "module load cuda", or another; repeatable',
        # Other modules are other libraries, which may round otherwise.
        affects="both",
        at="node",
        metavar="LINE",
        executes=True,
        usual=True,
        commands=("render",),
    )
    # --- the environment of the job's processes

    container: str | None = option(
        None,
        "image to run each node's task in: a path or docker://...; under Slurm",
        # Its libraries may round otherwise, as those of --setup.
        affects="both",
        at="node",
        metavar="IMAGE",
        path="input",
        executes=True,
    )
    container_runtime: str = option(
        "auto",
        "program that runs the image; auto: the first of these that is installed",
        affects="speed",
        at="node",
        choices=RUNTIMES,
        read_with=(Needs("container"),),
    )
    # --- how nodes and ranks meet

    host_suffix: str = option(
        "",
        "text after host names for the rendezvous, where the fabric's names differ, as n1-ib0",
        # Another name of a host may be that of another network, faster or slower.
        affects="speed",
        at="node",
        may_be_empty=True,
        commands=("doctor",),
    )
    interface: str | None = option(
        None,
        "network interface of the collectives (default: the one that routes to the head)",
        affects="speed",
        at="node",
        metavar="NAME",
        commands=("doctor", "render"),
    )
    rdzv_timeout_s: int = option(
        45,
        "how long a node tries to resolve and reach the head node",
        affects="nothing",
        at="node",
        metavar="SECONDS",
        least=1,
        most=DAY_S,
        commands=("render",),
        elsewhere=("rdzv_timeout",),
    )
    # --- what happens on stops, failures and hangs

    stop_lead_s: int | None = option(
        None,
        "stop, save and requeue this long before the time limit (default: 120, at most a third "
        "of --time)",
        affects="nothing",
        # Not "job", though sbatch carries it in --signal: batch scripts of one's own give it too.
        at="node",
        metavar="SECONDS",
        least=0,
        most=DAY_S,
        commands=("render",),
    )
    file_locks: str = option(
        "auto",
        "file locks of the Hugging Face caches; auto: the kind that holds between the nodes",
        affects="speed",
        at="rank",
        choices=("auto", *LOCK_PRIMITIVES),
        commands=("render",),
    )
    after: tuple[str, ...] = option(
        (),
        "start when this run has finished; under Slurm; repeatable",
        affects="nothing",
        # No sbatch key: sbatch takes ids of jobs, which `cluster.dependency` finds for the names.
        at="job",
        metavar="RUN",
        varies=False,
        elsewhere=("dependency",),
    )
    after_any: tuple[str, ...] = option(
        (),
        "start when this run has ended, finished or not; under Slurm; repeatable",
        affects="nothing",
        at="job",
        metavar="RUN",
        varies=False,
    )
    requeue: bool = option(
        True,
        "queue the job again after a stop or a node failure, to resume",
        affects="nothing",
        # No sbatch key: sbatch has one option for true and another for false.
        at="job",
    )
    strict: bool = option(
        False,
        "do not start if code, data, model or packages have changed since the submission; end a "
        "program whose ranks form no process group",
        affects="nothing",
        # What has changed is known where an attempt begins: on the job's first node.
        at="node",
    )
    max_requeues: int = option(
        3,
        "give up after this many requeues without a new checkpoint in between",
        affects="nothing",
        at="node",
        least=0,
        most=1_000_000,
        commands=("render",),
    )
    max_restarts: int = option(
        3,
        "restarts of all ranks within a job, after one of them failed",
        affects="nothing",
        at="node",
        least=0,
        most=1_000_000,
        commands=("render",),
    )
    hang_timeout_s: int = option(
        600,
        "a rank without a step for so long counts as hung; after some steps of the built-in "
        "training 10 times the slowest of the last, from 60 s on; 0: never",
        affects="nothing",
        at="node",
        metavar="SECONDS",
        least=0,
        most=YEAR_S,
        commands=("render",),
    )

    # --- checkpoints

    checkpoint_every: str = option(
        "10m",
        "time between checkpoints: 90s, 10m, 2h; 0: none by time",
        # Reports measure steps; a save is none.
        affects="nothing",
        at="rank",
        metavar="TIME",
        commands=("render",),
        elsewhere=("save_strategy",),
    )
    checkpoint_every_steps: int | None = option(
        None,
        "optimizer steps between checkpoints, in addition to those by time",
        affects="nothing",
        at="rank",
        metavar="STEPS",
        least=1,
        most=MOST_STEPS,
        commands=("render",),
        elsewhere=(
            "save_steps",
            "checkpointing_steps",
        ),
    )
    keep_checkpoints: int = option(
        # A resume takes the one before where the newest is damaged.
        2,
        "number of newest checkpoints that are kept, besides the best one",
        affects="nothing",
        at="rank",
        least=1,
        most=1_000_000,
        commands=("render",),
        elsewhere=("save_total_limit",),
    )

    # --- the rest

    plugins: dict[str, Any] = field(
        default_factory=dict, metadata=from_plugins(JOB_OPTIONS)
    )
    """Options of plug-ins; in config.json they stand among those above."""

    def __post_init__(self) -> None:
        check_options(self)
        check_credentials(self)
        # For its error alone: the field keeps the text as it was typed.
        of_steps = "; of steps: --checkpoint-every-steps {}"
        duration_s(self.checkpoint_every, "--checkpoint-every", of_steps)
        if self.time is not None:
            limit_s = time_limit_min(self.time) * 60
            # A lead that nobody asked for is shorter than any limit: see `lead_s`.
            requested_lead_s = self.stop_lead_s or 0
            if limit_s <= requested_lead_s:
                raise UsageError(
                    f"--stop-lead-s {self.stop_lead_s} leaves nothing of --time {self.time} to run",
                    "give more --time, or a shorter --stop-lead-s: at least what a save takes",
                )
        _check_memory(self)
        _check_run_name(self.name)
        check_lines(self)
        for pair in self.sbatch:
            _check_sbatch_pair(self, pair)
        _check_runs_dir(self.runs_dir)

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> "JobConfig":
        """Returns the job of a config.json. Its plug-ins are not imported: they may be missing
        here."""
        kernel_options = own_options(cls)
        of_plugins = {}
        for name, value in values.items():
            if name in kernel_options:
                continue
            # JSON has lists; options that are repeatable have tuples.
            if isinstance(value, list):
                value = tuple(value)
            of_plugins[name] = value
        return build_own(cls, values, of_plugins)

    def values(self) -> dict[str, Any]:
        """Returns name -> value of all options, as config.json has them."""
        kernel_values = {name: getattr(self, name) for name in own_options(JobConfig)}
        return kernel_values | self.plugins

    @property
    def chooses_cpus(self) -> bool:
        """True if the user says how many CPUs of a node the job gets; else Slurm's default counts,
        which is one for a task at many sites."""
        keys = [pair.lstrip("-").partition("=")[0] for pair in self.sbatch]
        is_in_sbatch = not _CPU_KEYS.isdisjoint(keys)
        return self.exclusive or self.cpus_per_task is not None or is_in_sbatch

    @property
    def least_nodes(self) -> int:
        """Nodes with which the job can start."""
        return self.min_nodes or self.nodes

    @property
    def node_range(self) -> str:
        """The number of nodes as sbatch takes it: "4", or "2-8"."""
        if self.min_nodes is None:
            return str(self.nodes)
        return f"{self.min_nodes}-{self.nodes}"

    @property
    def allocation(self) -> str:
        """The number of nodes to ask sbatch for, spare ones included: "4", or "2-8"."""
        most = self.nodes + self.spare_nodes
        if self.min_nodes is None:
            return str(most)
        return f"{self.min_nodes}-{most}"

    @property
    def least_allocation(self) -> int:
        """Nodes with which Slurm can start the job."""
        return self.min_nodes or self.nodes + self.spare_nodes

    @property
    def outlives_nodes(self) -> bool:
        """True if an attempt may begin without a node that the one before had."""
        return self.requeue and (self.min_nodes is not None or self.spare_nodes > 0)

    def on_nodes(self, count: int) -> "JobConfig":
        """Returns the job as it is on so many nodes, which `node_range` allows."""
        return dataclasses.replace(self, nodes=count, min_nodes=None, spare_nodes=0)

    def raised_mem_mib(self, most_mib: int) -> int | None:
        """Returns the memory a node that a requeue asks for where --mem was too small; None: no
        more. Nodes have at most `most_mib`."""
        if self.mem is None:
            return None
        mem_mib = _size_mib("--mem", self.mem)
        if self.max_mem is not None:
            most_mib = min(most_mib, _size_mib("--max-mem", self.max_mem))
        raised_mib = min(most_mib, math.ceil(_MEMORY_RAISE * mem_mib))
        # --mem 0 is all memory of a node: there is no more.
        if mem_mib == 0 or raised_mib <= mem_mib:
            return None
        return raised_mib

    def replaced(self, values: dict[str, Any]) -> "JobConfig":
        """Returns the job with other values of some options; UsageError where one cannot be
        right."""
        job = build(JobConfig, overridden(self.values(), values))
        # Options of a plug-in that is not installed here stay in the record.
        return dataclasses.replace(job, plugins=self.plugins | job.plugins)

    def options_of(self, plugin: type[Config]) -> Config:
        """Returns the options that a plug-in has added, as an instance of its dataclass."""
        return build(plugin, self.plugins)

    @property
    def project(self) -> str:
        """The name of the job for Slurm and trackers."""
        return self.job_name or self.name or "slurmft"

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between checkpoints; 0: none is due by time."""
        return duration_s(self.checkpoint_every, "--checkpoint-every")

    @property
    def lead_s(self) -> int:
        """Seconds from the stop signal to the time limit."""
        if self.stop_lead_s is not None:
            return self.stop_lead_s
        limit_s = time_limit_min(self.time or "unlimited") * 60
        # A job of five minutes would give 40 % of them to its stop.
        return min(LEAD_S, limit_s // 3)


def overridden(before: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns values with others in their place. A number alone ends a range that was there."""
    merged = before | values
    for name, each in own_options(JobConfig).items():
        if name in values and each.lower not in values:
            merged.pop(each.lower, None)
    return merged


class RunConfigFacts(TypedDict):
    """The content of config.json: what to run, where, and who asked for it."""

    program: dict[str, Any]
    """Kind and name of the program, and its settings."""
    job: dict[str, Any]
    """Options of the job: name -> value."""
    submission: Annotated[dict[str, Any], Submission]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole of config.json: what to run, where, and who asked for it."""

    program: Program
    job: JobConfig
    submission: Submission = field(default_factory=Submission)
    """When, where, by whom and from which code the run was submitted (`slurmft.cluster.submit`)."""

    def to_json(self) -> str:
        """Returns the text of config.json.

        Raises:
            UsageError: a value, such as the name of a folder, is not UTF-8: no JSON has it.
        """
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            lines = text[: error.start].count("\n")
            line = text.splitlines()[lines].strip().rstrip(",")
            raise UsageError(
                f"the run's configuration has a text that is not UTF-8: {line!a}",
                "give another one, or rename the file or the folder",
            ) from None
        return text

    def as_dict(self) -> RunConfigFacts:
        return RunConfigFacts(
            program=dataclasses.asdict(self.program),
            job=self.job.values(),
            submission=dataclasses.asdict(self.submission),
        )

    @property
    def name(self) -> str:
        """The beginning of the name of the run's directory: --name, or the program's name."""
        return self.job.name or self.program.name

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        parts = loads(text, _Parts)
        return cls(
            program=Program.from_json(parts.program),
            job=JobConfig.from_record(parts.job),
            # A damaged fact about the submission does not keep a job from its start.
            submission=decode_leniently(parts.submission, Submission),
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of config.json."""

    program: dict[str, Any]
    job: dict[str, Any]
    submission: dict[str, Any]


STAMP = re.compile(r"-(\d{8}-\d{6})-")
"""In the name of a run's directory: when it was submitted."""


def _check_run_name(name: str | None) -> None:
    """Raises UsageError where a name of a run could be taken for something else."""
    if name is None:
        return
    # A letter first: digits alone may be the id of a job, a hyphen begins a flag.
    is_plain = re.fullmatch(r"[A-Za-z][\w.-]{0,63}", name, re.ASCII)
    # In a folder's name a hyphen follows: with it, a time at the end is seen, too.
    followed = f"{name}-"
    # `last` means the newest run, wherever a run is named.
    if is_plain and name != "last" and not STAMP.search(followed):
        return
    before_time, *_ = STAMP.split(followed)
    safe = re.sub(r"[^\w.-]+", "-", before_time, flags=re.ASCII)
    safe = safe.strip("-._")
    hint = (
        "give a letter, then at most 63 letters, digits, hyphens, underscores and dots, "
        "not 'last'"
    )
    # What is left may still be no name: it may begin with a digit.
    if re.fullmatch(r"(?!last$)[A-Za-z].{0,63}", safe):
        hint += f": --name {safe}"
    raise UsageError(f"--name {name!r} cannot be the name of a run", hint)


def with_absolute_paths(job: JobConfig) -> JobConfig:
    """Returns the job with absolute paths: it may start in another folder."""
    paths: dict[str, Any] = {}
    values = job.values()
    for name, each in options(JobConfig).items():
        value = values.get(name)
        # A place on the nodes ("there") is absolute already.
        if each.path in ("input", "output") and value is not None:
            paths[name] = str(absolute(value))
    # docker://ubuntu looks like a relative path, and is none.
    if image_kind(job.container or "") == "registry":
        del paths["container"]
    return job.replaced(paths)


# docker://ubuntu and oci-archive:/x.tar; or HOST/IMAGE and HOST#IMAGE, where the host has a dot or
# a port, or is localhost.
_IN_REGISTRY = re.compile(r"[\w+.-]+:/.+|([\w@-]+([.:][\w-]+)+|localhost)[/#].+")


def image_kind(image: str) -> str:
    """Returns what an image is, by its name: "registry" (docker://ubuntu, nvcr.io#nvidia/torch:1),
    "folder" or "file".

    Raises:
        NotOwnError: it is the name of an image in a registry, and of a file of another user's.
    """
    path = Path(image)
    # A folder may be called as a host is (nvcr.io/torch): what is there is meant.
    if _IN_REGISTRY.fullmatch(image):
        if not path.exists():
            return "registry"
        trusted.check_meant("--container", image, "an image of a registry")
    if path.is_dir():
        return "folder"
    return "file"


_MEMORY_RAISE = 1.5
"""How many times --mem a requeue asks for, where that was too small."""
LEAD_S = 120
"""Seconds from the stop signal to the time limit, where neither flag nor time says otherwise."""
# A year: submitit's local executor wants a number, also where there is no limit.
_UNLIMITED_MIN = 60 * 24 * 365
# sbatch counts in 32 bits; and Python takes no number of thousands of digits.
_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")


def time_limit_min(text: str) -> int:
    """Returns a Slurm time limit in minutes, rounded up.

    Its forms are "90", "30:00", "1:30:00", "2-12" and "2-12:00:00".

    Raises:
        UsageError: it has none of sbatch's forms, or is zero.
    """
    if text.lower() in ("infinite", "unlimited"):
        return _UNLIMITED_MIN
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise UsageError(f"invalid time limit: --time {text!r}", _time_hint(text))
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part]
    # As sbatch reads them: behind days, or before two others, the first number is hours.
    units_s: tuple[int, ...] = (60, 1)  # MM[:SS]
    if days or len(parts) == 3:
        units_s = (3600, 60, 1)  # D-HH[:MM[:SS]], HH:MM:SS
    seconds = 86400 * int(days or 0)
    # The smaller units may be absent.
    for part, unit_s in zip(parts, units_s, strict=False):
        seconds += part * unit_s
    # sbatch would take it for no limit at all.
    if seconds == 0:
        raise UsageError(
            f"--time {text!r} leaves no time to run", "give at least one minute"
        )
    return math.ceil(seconds / 60)


_UNITS = "KMGTP"
"""Units of memory, each 1024 times the one before."""


def _size_mib(flag: str, text: str) -> int:
    """Returns an amount of memory in MiB, rounded up; without a unit it is in MiB, as in Slurm.

    Raises:
        UsageError: the text, which belongs to the flag, is none.
    """
    match = re.fullmatch(
        r"(\d+)(?:([KMGTP])i?B?)?", text.strip(), re.ASCII | re.IGNORECASE
    )
    # sbatch's hint would be the partitions, which do not help.
    if match is None:
        raise UsageError(
            f"{flag} {text!r} is no amount of memory",
            "write it as 64G or 900M; 0 is all memory of a node",
        )
    number, unit = match.groups("M")
    exponent = _UNITS.index(unit.upper()) - _UNITS.index("M")
    return math.ceil(int(number) * 1024.0**exponent)


def _check_memory(job: JobConfig) -> None:
    if job.mem is None:
        return
    mem_mib = _size_mib("--mem", job.mem)
    if job.max_mem is not None and _size_mib("--max-mem", job.max_mem) < mem_mib:
        raise UsageError(
            f"--max-mem {job.max_mem} is less than --mem {job.mem}",
            "give at least as much; the same size: a requeue asks for no more",
        )


_SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _time_hint(text: str) -> str:
    """Returns how a time limit is written; one with units, as "2h", is translated."""
    match = re.fullmatch(r"(\d+) ?([mhd])[a-z]*", text.strip().lower())
    if match is None:
        return "use M, HH:MM:SS or D-HH:MM:SS"
    number, unit = match.groups()
    if unit == "m":
        return f"minutes have no unit: {number}"
    if unit == "h":
        return f"write it as {int(number):02}:00:00"
    return f"write it as {int(number)}-00"


def duration_s(text: str, what: str, more: str = "") -> float:
    """Returns the seconds of "90s", "10m", "2h", "3d", or of "0".

    Args:
        more: what else may be meant by a number without a unit, with `{}` in its place.

    Raises:
        UsageError: the text, which belongs to the flag `what`, has none of these forms. So is a
            number without a unit, which may be meant as minutes, days or steps.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UsageError(
            f"{what} {text!r} is not a duration", "write it as 90s, 10m, 2h or 3d"
        )
    number, unit = match.groups()
    if not unit and float(number) > 0:
        units = (
            f"{number}d are days, {number}h hours, {number}m minutes, {number}s seconds"
        )
        raise UsageError(f"{what} {text!r} has no unit", units + more.format(number))
    return float(number) * _SECONDS_OF_UNIT[unit]


def _check_runs_dir(path: str) -> None:
    # The logs lie in the run directory, and sbatch expands patterns anywhere in their paths.
    pattern = re.search(r"%\w|%%|\\", path)
    if pattern:
        raise UsageError(
            f"--runs-dir {path!r} holds {pattern[0]!r}, which Slurm replaces in file names",
            "give a folder without it",
        )


_LEAVE_OUT = "leave it out"
_RESERVED = {
    # A node has one task, which starts its ranks.
    "ntasks": _LEAVE_OUT,
    "ntasks-per-node": _LEAVE_OUT,
    # Logs are looked for in the run directory; a requeued job goes on with its own.
    "output": "slurmft logs last shows them all",
    "error": "slurmft logs last shows them all",
    "open-mode": _LEAVE_OUT,
    # Tasks of an array have ids of another form.
    "array": "slurmft study run makes arrays",
    # A job that Slurm keeps though its first node has died needs another one that looks for that.
    "no-kill": "give --spare-nodes N, or --nodes MIN-MAX: both keep a job whose node has died",
    "requeue": "give --requeue",
    "no-requeue": "give --no-requeue",
    "signal": "give --stop-lead-s",
    # The id of the job is read from what sbatch prints when it has queued it.
    "parsable": _LEAVE_OUT,
    "quiet": _LEAVE_OUT,
    "wait": "give --follow",
    # There would be no job, or one with another script.
    "test-only": "give --dry-run",
    "wrap": _LEAVE_OUT,
    # squeue, scontrol and scancel have to ask the same one.
    "clusters": "export SLURM_CLUSTERS=NAME: all of Slurm's commands then speak to that cluster",
}
"""sbatch options on which slurmft's own working depends -> what to do in their place."""

EXPEDITED = "requeue=expedite"
"""The value of --sbatch by which Slurm starts a job again before all others, on its nodes."""


def _check_sbatch_pair(job: JobConfig, pair: str) -> None:
    key = pair.partition("=")[0].lstrip("-")
    # One letter is a short option, such as -p: by that name it would pass the checks below.
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]+", key):
        raise UsageError(
            f"--sbatch {pair!r} is not KEY=VALUE", 'write it as --sbatch "nice=100"'
        )
    if pair.lstrip("-") == EXPEDITED:
        if not job.requeue:
            raise UsageError(
                f"--sbatch {EXPEDITED} contradicts --no-requeue", "give one of the two"
            )
        return
    # sbatch takes the beginning of an option's name as well.
    reserved = [name for name in _RESERVED if name.startswith(key)]
    if reserved:
        raise UsageError(
            f"--sbatch {pair!r}: slurmft sets {reserved[0]} itself, or relies on it",
            _RESERVED[reserved[0]],
        )
    for name, each in own_options(JobConfig).items():
        is_given = getattr(job, name) not in (None, False)
        # sbatch would take the last of the two, whichever that is.
        if each.sbatch == key and is_given:
            raise UsageError(
                f"--sbatch {pair!r} contradicts {each.flag}", "give one of the two"
            )
