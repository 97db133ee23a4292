"""What is known of a run, as `--json` prints it and the interface for programs returns it."""

from typing import Annotated, Any, TypedDict

from slurmft.cluster.job_state import Phase
from slurmft.cluster.pending import Waiting
from slurmft.core.run_files import Metrics, Transition
from slurmft.runs.origin import Origin


class Described(TypedDict):
    """What a run is, by its configuration. null is what it does not have."""

    name: str
    path: str
    user: str | None
    task: str | None
    model: str | None
    data: str | None
    nodes: int | None


class Progress(TypedDict):
    """The progress of a run. null is what is not known."""

    steps_done: float | None
    steps_total: float | None
    epoch: float | None
    samples_per_s: float | None
    left_s: float | None
    """Seconds of training that are left, as the run has estimated them."""
    loss: float | None
    metrics: Metrics | None
    """Of the last evaluation."""


class RunSummary(Described, Progress):
    """One run of `slurmft list`. null is what is not known."""

    submitted: str | None
    """ISO time."""
    cluster: str | None
    """The launcher: slurm, local, ..."""
    where: str | None
    """The name of the Slurm cluster, or the host."""
    job: str | None
    """The id of the job that was submitted last."""
    state: Phase
    reason: str
    """Why it waits, failed or was cancelled: Slurm's words, or its own."""
    waiting: Annotated[dict[str, Any], Waiting] | None
    """Why Slurm has the job wait."""
    expected_start: str | None
    """When Slurm expects the job to start, in local time."""
    requeues: int
    """How often the job was requeued since the run was last submitted."""


class Checkpoint(TypedDict):
    """A checkpoint that a run can resume from."""

    name: str
    bytes: int
    time: float
    """Unix seconds."""


class FailureFacts(TypedDict):
    """An error that ended a process of a run, and that no other process has caused."""

    where: str
    """The process, in words: rank 3 on n1."""
    message: str
    hint: str | None
    attempt: int
    time: float
    """Unix seconds."""


class Cost(TypedDict):
    """What a run cost, over all attempts. null is what is not known."""

    node_hours: float
    gpu_hours: float | None
    cpu_hours: float | None
    peak_memory_bytes: int | None
    """Of a node."""
    asked_memory_bytes: int | None
    """Of a node."""
    energy_j: float | None
    longest_s: float
    """The longest attempt."""
    source: str
    """Slurm's accounting, or the run's own records."""


class CostAndAdvice(Cost):
    """What a run cost, over all attempts, and a better request for the next time."""

    advice: str
    """Empty where the request fits, or its use is unknown."""


class TimeParts(TypedDict):
    """Seconds of a run, by what they were spent on. They add up to all of its time."""

    steps_s: float
    """Steps that count: none of them had to be done again."""
    queue_s: float
    """From a submission or a requeue to the start of the job."""
    start_s: float
    """From the start of a job until the ranks train; after a failure, until they train again, or
    the job is over."""
    lost_s: float
    """Steps and evaluations after the checkpoint that the run went on from."""
    saves_s: float
    """While the ranks wait for a checkpoint; at a stop and at the end, until the job is over."""
    evaluations_s: float
    waits_s: float
    """Of an average rank for the slowest one, in forward passes."""
    hangs_s: float
    """From the last sign of ranks that hung until the watchdog ended them."""
    program_s: float
    """A program ran that does not tell its steps, or a prediction predicted."""


class AttemptTime(TimeParts):
    """Where the time of one attempt went, with the queue before it."""

    attempt: int


class TimeUse(TimeParts):
    """Where the time of a run went, from its submission to its end, or until now."""

    total_s: float
    ettr: float | None
    """The share of steps that count, from 0 to 1. null: a program ran that does not tell its steps,
    and `steps_s` is the least they took; or the run is a prediction, which has none."""
    attempts: list[AttemptTime]


class RunFacts(RunSummary):
    """All that is known of a run. null is what is not known."""

    queue: list[str]
    """Lines about the queue of a pending job."""
    cost: CostAndAdvice
    time_use: TimeUse
    owner: str
    """The user whom the configuration belongs to."""
    is_own: bool
    """Nobody else can have written the run."""
    inode: int | None
    """The inode of its folder, where nobody else can have written the run: where others can rename,
    another may have its name later."""
    origin: Annotated[dict[str, Any], Origin] | None
    """Where the run was fetched from."""
    program: dict[str, Any]
    """The program as config.json has it."""
    job_options: dict[str, Any]
    """Options of the job as config.json has them: name -> value."""
    submission: dict[str, Any]
    """When, where, by whom and from which code it was submitted, as config.json has it."""
    hosts: list[str]
    """By rank, each once."""
    history: list[Transition]
    """Oldest first."""
    changed: dict[str, str]
    """What has changed since the submission: path or package -> how, in words."""
    attempts: int
    """How often a job of the run has started."""
    last_record: float | None
    """When the run last wrote a record, in Unix seconds."""
    disk: str | None
    """Why the disk of a run that is alive takes no records any more."""
    evaluating: tuple[int, int] | None
    """Samples done and in all, of an evaluation under way."""
    checkpoints: list[Checkpoint]
    """Oldest first."""
    warnings: list[str]
    failures: list[FailureFacts]
    result: dict[str, Any] | None
    """result.json of a finished run."""
    model_path: str | None
    """The folder of the trained model."""
    logs: str
    """The folder of the logs."""
