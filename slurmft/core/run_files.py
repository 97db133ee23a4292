"""The JSON files of a run as dataclasses: what the toolkit writes, and reads by `core.decode`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time as now
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

from slurmft.core.decode import Measurement
from slurmft.core.errors import Exit, SlurmftError

ATTEMPT = "SLURMFT_ATTEMPT"
"""Variable with the number of the attempt, from 1, in every process of a job."""
FINAL_STATES = ("finished", "failed", "cancelled")
UNKNOWN = "unknown"
"""The state of a run whose record is absent, or cannot be read."""

# Eight bits, as the kernel keeps them: a larger number may become 0, a success.
ExitCode: TypeAlias = Annotated[int, range(256)]
Count: TypeAlias = Annotated[int, range(1, 2**31)]
Metrics: TypeAlias = dict[str, Measurement]
"""Name -> value; None stands for NaN and infinities, which JSON lacks."""


def current_attempt() -> int:
    """Returns the attempt that this process belongs to; 0 for one that was started by hand."""
    return int(os.environ.get(ATTEMPT, "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A change of a run's state."""

    state: str
    """submitted, running, stopping, requeued, finished, failed or cancelled."""
    time: float
    """Unix seconds."""
    reason: str = ""
    exit_code: ExitCode | None = None
    attempt: int | None = None
    """The attempt that began, of "running"."""
    checkpoint: str | None = None
    """The newest checkpoint when the attempt began, of "running"."""
    avoided: bool = False
    """The job was requeued before its start, to avoid hosts that failed before."""
    in_allocation: bool = False
    """The next attempt begins at once, in the allocation of this one: no job is queued again."""
    raised_mem_mib: int | None = None
    """The memory a node that the job asks for from now on, because --mem was too small; 0: Slurm
    has refused it; None: as before."""

    @property
    def word(self) -> str:
        """The state as pages and messages call it: what starts again at once is not requeued."""
        if self.in_allocation:
            return "restarting"
        return self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class State(Transition):
    """The last recorded state of a run, and all before it (state.json)."""

    # No default: a file without it is damaged, and not one of a run without a past.
    history: list[Transition]
    """Oldest first; the last one is this state."""

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def problem(self) -> str:
        """Why the record cannot be read; "" where it can, or there is none."""
        if self.state == UNKNOWN:
            return self.reason
        return ""

    @property
    def raised_mem_mib_since_submission(self) -> int | None:
        """The memory a node that the job asks for instead of --mem; None: --mem."""
        return _last_raise(self.since_submission())

    def raised_mem_mib_since(self, attempt: int) -> int | None:
        """Returns the memory a node that was asked for after an attempt began; None: no other."""
        after: list[Transition] = []
        for each in self.history:
            after.append(each)
            if each.state == "running" and each.attempt == attempt:
                after.clear()
        return _last_raise(after)

    def since_submission(self) -> list[Transition]:
        """Returns what followed the last submission, oldest first."""
        # From the end: every resume is a submission.
        for index in range(len(self.history) - 1, -1, -1):
            if self.history[index].state == "submitted":
                return self.history[index + 1 :]
        # The file was damaged once: its history begins with what was recorded after that.
        return self.history

    def starts_since_submission(self) -> list[Transition]:
        """Returns the attempts since the last submission with which the job started, oldest first:
        not those in the allocation of the one before."""
        starts = []
        is_in_allocation = False
        for each in self.since_submission():
            if each.state == "running" and not is_in_allocation:
                starts.append(each)
            is_in_allocation = each.in_allocation
        return starts


def _last_raise(transitions: Sequence[Transition]) -> int | None:
    for each in reversed(transitions):
        if each.raised_mem_mib is not None:
            return each.raised_mem_mib or None
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job that was submitted last for a run (job.json)."""

    cluster: str
    """Name of its launcher, or kubernetes."""
    id: str
    where: str = ""
    """The name of the Slurm cluster, or the host; "" where it is not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The last attempt that has begun: from the start of a job to its end or requeue
    (attempt.json)."""

    number: int
    """From 1."""
    job: str
    """The id of the job."""
    hosts: list[str]
    time: float = 0.0
    """When it began, in Unix seconds."""
    submission: int | None = None
    """How often the run had been submitted."""
    restarts: int = 0
    """How often Slurm had started the same job before."""
    changed: dict[str, str] = field(default_factory=dict)
    """Changes since the submission: path or package -> how, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The last meeting of the ranks (started.json)."""

    attempt: int
    meetings: int
    """How often the ranks have met in this attempt."""
    world_size: int | None = None
    """How many ranks it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the tasks of an attempt ended (ended.json): the batch script writes it before anything
    decides what becomes of the run."""

    attempt: int
    code: ExitCode


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended one process of a run (failures/*.json)."""

    where: str
    """The process, in words: "rank 3 on n1"."""
    message: str
    hint: str | None = None
    code: ExitCode = Exit.FAILED
    traceback: str | None = None
    """The traceback of an error that nobody foresaw."""
    secondary: bool = False
    """It only says that another process failed."""
    step: int = 0
    """The optimizer step at which it happened."""
    retry: bool = False
    """A requeue may help: it was not an error of the run itself."""
    out_of_memory: bool = False
    """The kernel killed a process because the memory of its node, or job, ran out."""
    memory_failures: int | None = None
    """A program of the user's own ran out of memory, the host's or a device's: how often it had
    before this start. None: it failed otherwise."""
    bad_host: str | None = None
    """The host that may be to blame, by Slurm's name."""
    exclude: bool = False
    """The host is certainly bad, and must not be used again."""
    attempt: int = field(default_factory=current_attempt)
    meetings: int | None = None
    """How many meetings the rank had seen; None where it is not the failure of a rank itself."""
    hang_s: float | None = None
    """Seconds without a heartbeat, of a hang."""
    time: float = field(default_factory=now)
    checkpoint: str | None = None
    """The checkpoint that a program of the user's own could not start from."""

    @classmethod
    def of(cls, where: str, error: SlurmftError, **details: Any) -> "Failure":
        """Returns the failure of a process by an error; `details` are further fields."""
        # On another host it may not happen again.
        if error.retry or details.get("bad_host") is not None:
            details["retry"] = True
        if error.out_of_memory:
            details["out_of_memory"] = True
        return cls(where, error.message, error.hint, int(error.code), **details)

    @property
    def is_loss_of_peer(self) -> bool:
        """A rank only says that it lost another. Where nothing else is known, the cause is not."""
        return self.secondary and self.meetings is not None

    def __str__(self) -> str:
        text = f"{self.message} ({self.where})"
        if self.is_loss_of_peer:
            return f"a peer was lost, and no node recorded why; what was seen: {text}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A collective that a rank has called."""

    group: str
    """The backend and the name of its process group: "gloo:0"."""
    number: int
    """Of the calls in this group, from 1; the same on all ranks."""
    operation: str
    bytes: int
    """Of its input or its output, whichever is more."""
    waits: bool
    """It has not ended."""
    seconds: float
    """Since it was called."""
    is_backward: bool = False
    """torch has called it in a thread of the backward pass, as it does on GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallGroup:
    """A process group, as a rank of it has used it."""

    last: int
    """The number of the rank's last call."""
    ranks: list[int] = field(default_factory=list)
    """Its members; empty where torch does not say."""
    description: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The last collectives of a rank, by torch's Flight Recorder."""

    # A damaged number of ranks must not be counted to.
    world_size: Annotated[int, range(1, 2**17)]
    lost_peer: bool
    """It ended by an exception: then torch does not say which calls have ended."""
    is_full: bool
    """Older calls are not recorded any more."""
    where: str
    """Where the main thread of the rank is, in words: "backward, train.py:24"; "": not known."""
    groups: dict[str, CallGroup]
    calls: list[Call]
    idle_s: float | None = None
    """Since its last call, sends and receives included; None: there was none."""


ENDED = "ended"
"""The state of a process that has ended without an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCalls:
    """What a rank was doing when ranks hung, or when it ended (logs/collectives-rank-*.json)."""

    rank: int
    host: str
    attempt: int
    process: str
    """The kernel's letter for the state of its process: T is stopped; or "gone", or `ENDED`."""
    step: int
    """The last step that is done."""
    phase: str
    calls: Calls | None
    """None: it has not answered, as a stopped process does not; or its torch has no recorder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLimits:
    """The most samples of a batch of one rank that memory has held (memory.json); None: no batch
    was too large."""

    train_samples: Count | None = None
    evaluate_samples: Count | None = None
    tried_samples: Count | None = None
    """What --batch-size auto has tried last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """The host, devices and cores of one rank."""

    rank: int
    host: str
    node: int | str | None = None
    """The number of its node."""
    # Not checked: readers show or compare them, and a damaged one must not hide the rest.
    device: Any = None
    threads: Any = None
    cores: Any = None
    allotted_cores: Any = None
    kernel: Any = None
    prefix: Any = None
    is_staged: Any = None
    imports_s: Any = None
    variables: Any = None
    """Variable -> value, where it is not that of all ranks (`Environment.variables`)."""
    hardware: Any = None
    """Hardware that the node gave to the job; the first rank of each node has it."""

    @property
    def node_number(self) -> int:
        # A file that somebody has edited may have any text.
        try:
            return int(self.node or 0)
        except ValueError:
            return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Packages and hardware of a run's ranks (environment.json)."""

    versions: dict[str, str | None] = field(default_factory=dict)
    """Package -> version."""
    python: str | None = None
    variables: dict[str, str | None] = field(default_factory=dict)
    """Variable -> value, of those of threads, libraries and fabrics, as all ranks had them."""
    ranks: list[Rank] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        """The hosts in the order of the ranks, each once."""
        # A dictionary keeps the order, which a set would not.
        return list(dict.fromkeys(rank.host for rank in self.ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScores:
    """How well one class was predicted."""

    precision: float
    recall: float
    f1: float
    support: int
    """How many texts are of the class."""
    predicted_as: dict[str, int] | None = None
    """Class -> how many of these texts were taken for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Values that the toolkit itself reads of result.json, which the program writes.

    One that is absent, or of another type, is None: read it by `decode_leniently`.
    """

    metrics: Metrics | None = None
    loss: float | None = None
    steps: float | None = None
    total_steps: float | None = None
    epochs: float | None = None
    train_samples_per_s: float | None = None
    classes: dict[str, ClassScores] | None = None
    peak_memory_bytes: list[float] | None = None
    """By rank."""


RESULT_KEYS = ("metrics", "phases_s", "world_size", "nodes", "steps", "wall_s")
"""Keys that every result has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GitCommit:
    """The commit that a work tree was at."""

    commit: str | None
    dirty: bool = False
    """Tracked files differed from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyEntry:
    """The place of a run in its study."""

    name: str
    """Of the study."""
    cell: dict[str, Any]
    """Option -> value."""
    repeat: int | None = None
    """From 1; None: it does not say which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """When, where, by whom, by which command and from which code a run was submitted: the part that
    tables and reports show, of a configuration of any version."""

    time: str = ""
    """ISO 8601, in UTC."""
    host: str = ""
    user: str | None = None
    command: str = ""
    slurmft: str = ""
    """The version."""
    git: GitCommit | None = None
    study: dict[str, Any] | None = None
    """A `StudyEntry`. Not checked here: a run whose entry is damaged is a run of no study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The copy of a program's code in its run."""

    mode: str
    """git or folder."""
    root: str = ""
    """The folder that it was copied from."""
    files: int
    bytes: int = 0
    sha256: str = ""
    """Of the names and contents of the files."""
    commit: str | None = None
    changed: int = 0
    """How many files differed from the commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission(Provenance):
    """All that a configuration says of its submission, as this version writes it."""

    folder: str = ""
    """The working directory of the command."""
    site_file: str | None = None
    python: str = ""
    """The version of slurmft's own Python."""
    code: str = ""
    """The fingerprint of slurmft's modules."""
    request: str = ""
    """The id of the request, of a command with `--on`."""
    sender: str = ""
    """The host and folder where a command with `--on` was typed."""
    dependency: str | None = None
    """The jobs that the job waits for, as sbatch wants them; None: it has never waited for any."""
    snapshot: Snapshot | None = None
    resumed: list["Submission"] = field(default_factory=list)
    """The resumes, oldest first."""
    job_before: str | None = None
    """The run's job before a resume with `--on`."""


# Dictionaries, not dataclasses: they are checked, and nobody reads them. Readers of a configuration
# of any version take config.json as it is. To define a dataclass takes 0.5 ms of every command.


class _Settings(TypedDict):
    task: NotRequired[str | None]
    model: NotRequired[str | None]
    data: NotRequired[str | None]
    epochs: NotRequired[int | None]


class _Input(TypedDict):
    sha256: str


class _Program(TypedDict):
    kind: str
    name: NotRequired[str]
    settings: NotRequired[_Settings]
    inputs: NotRequired[dict[str, _Input]]


class _JobOptions(TypedDict):
    nodes: NotRequired[Count]
    min_nodes: NotRequired[Count | None]
    spare_nodes: NotRequired[Annotated[int, range(2**31)]]
    cluster: NotRequired[str]
    requeue: NotRequired[bool]
    after: NotRequired[list[str]]
    after_any: NotRequired[list[str]]


CHECKED_OF_JOB = _JobOptions.__optional_keys__
"""Options of a job whose values are checked."""


class AnyConfig(TypedDict):
    """The parts of a config.json of any version that must be right for its run to be listed or
    reported."""

    program: _Program
    job: _JobOptions
    submission: Provenance
