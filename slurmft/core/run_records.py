"""The records of a run (records.jsonl): which values readers rely on, by the event of a record.

A program may record further events and further values. A record that lacks one of these values, or
has one of another type, is left out by readers.
"""

from dataclasses import dataclass, field
from typing import Any

from slurmft.core.decode import matches
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
class Step(Record):
    """An optimizer step, or the last of several."""

    step: int
    total_steps: int = 0
    epoch: float = 0.0
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_s: float | None = None
    """Since the last record that has it."""
    left_s: float | None = None
    """Seconds of training that are left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed(Step):
    """A step that ends a window of the speed."""

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
    step: int = 0
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Record):
    step: int
    checkpoint: str
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Record):
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop(Record):
    step: int
    evaluations: int
    metric: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Text(Record):
    """A warning, or what a preflight has to say."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks(Record):
    """Time of each rank's own work and its memory, by rank."""

    own_ms: list[float]
    memory_mib: list[float]


_EVENTS: dict[str, type[Record]] = {
    "start": Start,
    "step": Step,
    "evaluate": Evaluate,
    "epoch": Epoch,
    "resume": Resume,
    "stopping": Stopping,
    "early_stop": EarlyStop,
    "warning": Text,
    "preflight": Text,
    "ranks": Ranks,
}


def is_record(value: Any) -> bool:
    """Returns whether a line of records.jsonl is a record that its readers understand. One of an
    unknown event is."""
    if not matches(value, Record):
        return False
    kind = _EVENTS.get(value["event"])
    return kind is None or matches(value, kind)
