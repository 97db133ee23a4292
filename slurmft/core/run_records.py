"""The records of a run (records.jsonl): which values readers rely on, by the event of a record.

A program may record further events and further values. A record that lacks one of these values, or
has one of another type, is left out by readers.
"""

from dataclasses import dataclass, field
from typing import Any

from slurmft.core.decode import DecodeError, NullIsNaN, decode
from slurmft.core.run_files import Count, Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Any record."""

    event: str
    time: float = 0.0
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(Record):
    """The ranks have met, and training starts."""

    total_steps: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """How many tokens a model knows, and how many of them its data uses."""

    used: int
    all: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportTimes:
    """Seconds that the imports of the ranks took, by node."""

    min: float
    median: float
    max: float
    slowest: str
    """The host of the largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStart(Start):
    """The start of the built-in training, which says more of itself than another program."""

    task: str
    world_size: Count
    nodes: int
    precision: str
    backend: str
    parameters: int
    global_batch_size: int
    """Samples of a step."""
    limited_from: int | None = None
    """How many they were to be, where --max-global-batch-size has made them fewer."""
    batch_size: int | None = None
    """Samples at a time that --batch-size auto has found to fit into memory."""
    step_samples: int | None = None
    """Samples of the largest step: fewer than a global batch where the data has no more."""
    optimizer: str | None = None
    learning_rate: float | None = None
    """The peak of the schedule."""
    optimizer_reason: str = ""
    """Why these two were chosen; "" where they were given."""
    trained_parameters: int | None = None
    vocabulary: Vocabulary | None = None
    imports_s: ImportTimes | None = None
    best_by: str | None = None
    """What the best checkpoint has, where --metric decides: "lowest mse"."""
    data: list[str] = field(default_factory=list)
    """What the data has, in lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Record):
    """An optimizer step, or the last of several."""

    step: int
    steps: int = 1
    """How many steps it stands for."""
    total_steps: int = 0
    """0: unknown."""
    epoch: float | None = None
    loss: NullIsNaN | None = None
    samples_per_s: float | None = None
    """Since the last record that has it."""
    left_s: float | None = None
    """Seconds of training that are left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed(Step):
    """A step that ends a window of the speed."""

    # Fields of a step, without their defaults: a record that lacks one of them is a plain step.
    time: float
    total_steps: Count
    samples_per_s: float
    left_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate(Record):
    """Progress of an evaluation, in samples of the first rank."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch(Record):
    """The end of an evaluation."""

    metrics: Metrics
    epoch: float = 0.0
    """0: the program does not count epochs."""
    step: int | None = None
    loss: NullIsNaN | None = None
    """The training loss of the last step before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Record):
    """An attempt goes on from a checkpoint."""

    step: int
    checkpoint: str
    changes: list[str] = field(default_factory=list)
    """What is other than before, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Record):
    """The ranks have agreed to save and to end."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop(Record):
    """The training ends, because evaluations have not become better."""

    step: int
    evaluations: int
    metric: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSaved(Record):
    """The model that is saved is that of the best evaluation, not the last one."""

    step: int
    """The optimizer step of that evaluation."""
    epoch: float
    metric: str
    best: float
    last: NullIsNaN


@dataclass(frozen=True, kw_only=True, slots=True)
class Text(Record):
    """Words for whoever follows the run."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(Text):
    """A warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined(Text):
    """The result of a preflight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared(Text):
    """The result of a measurement of gloo and oneCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks(Record):
    """Time of each rank's own work in a step and its memory, by rank."""

    own_ms: list[float]
    memory_mib: list[float]
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Met(Record):
    """The ranks have met: at the start of an attempt, or after torchrun has started them again."""

    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun(Record):
    """What the ranks do from now on: train, evaluate or save.

    There is no such record where `phase_after` says it.
    """

    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Record):
    """A checkpoint: the trainer's, when its copy is in memory; that of another program, when it is
    written."""

    step: int


_KINDS: dict[str, tuple[type[Record], ...]] = {
    # TrainingStart first: keys that are no fields are ignored, so Start would take such a record,
    # too, and lose them.
    "start": (TrainingStart, Start),
    "step": (Speed, Step),
    "evaluate": (Evaluate,),
    "epoch": (Epoch,),
    "resume": (Resume,),
    "stopping": (Stopping,),
    "early_stop": (EarlyStop,),
    "best_saved": (BestSaved,),
    "warning": (Warned,),
    "preflight": (Examined,),
    "collectives": (Compared,),
    "ranks": (Ranks,),
    "met": (Met,),
    "phase": (PhaseBegun,),
    "checkpoint": (Saved,),
}
"""Event -> what a record of it is: the first that it fits. The last one fits all that are whole."""

EVENTS: dict[type[Record], str] = {kinds[-1]: event for event, kinds in _KINDS.items()}
"""What all whole records of an event are -> the event."""


_ENDED_PHASES = {"epoch": "evaluate", "checkpoint": "save"}
"""Event -> the phase that it ends."""


def phase_after(phase: str, event: str) -> str:
    """Returns what the ranks do after an event, until a record of a phase says otherwise."""
    # Another phase goes on: a thread may write a checkpoint while the ranks evaluate.
    ends_phase = _ENDED_PHASES.get(event) == phase
    if ends_phase or event in ("start", "resume"):
        return "train"
    return phase


def record_of(value: Any) -> Record | None:
    """Returns a line of records.jsonl as a record; None where its readers do not understand it."""
    # Any JSON may stand in a line, as after a file was damaged.
    if not isinstance(value, dict):
        return None
    event = value.get("event")
    if not isinstance(event, str):
        return None
    # An event of the program's own need only have a time, if any.
    for kind in _KINDS.get(event, (Record,)):
        try:
            return decode(value, kind)
        except DecodeError:
            # The next kind needs less. A record that fits none is damaged.
            continue
    return None
