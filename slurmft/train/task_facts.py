"""What the login node has to know of a task; the tasks that come with slurmft (tasks.toml)."""

import tomllib
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """Facts of a task for which nothing needs to be imported."""

    splits: tuple[str, ...] = ("train", "validation")
    """Names of its data files; none: its data is generated."""
    rows: Any = "Texts"
    """Format of its rows: name of a class in `slurmft.train.login.formats`, or a class of yours."""
    rows_are_samples: bool = True
    """Each row is one sample, and not a part of a long text."""
    labels: tuple[str, ...] | None = None
    """Names of the classes; none: labels are numbers; None: those that the training data has."""
    pipeline: str = "text-classification"
    """Name of the task on the hub; "": the name of its preset."""
    library: str = "transformers"
    """Library that loads its model, as the hub calls it."""
    packages: tuple[str, ...] = ()
    """Optional packages that it needs."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names of its metrics, of which the first decides which checkpoint is the best."""
    preset_metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Preset -> its metrics, where they are others."""
    data_metrics: tuple[str, ...] = ()
    """Metrics that it has in place of these, where its labels are of another kind."""
    reads: tuple[str, ...] = ("source_prefix",)
    """Names of the options that it reads, of those that not all tasks do: `Option.by_task`."""
    predictions: str = "classes"
    """Kind of its predictions, for --metric: classes, numbers, flags (0 or 1 of each class), tags
    (classes of words), answers, texts; "": none of them. See `evaluate_metrics.examples`. And
    vectors, which no metric takes."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """For a task of your own: options whose defaults differ from those of text-classification."""

    def metrics_of(self, preset: str | None) -> tuple[str, ...]:
        """Returns the names of the metrics of a preset."""
        return tuple(self.preset_metrics.get(str(preset), self.metrics))

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What the names of the metrics of each validation split end with: "", or of MNLI's two
        "_matched" and "_mismatched"."""
        return tuple(split.removeprefix("validation") for split in self.splits[1:])


class TaskDeclaration(ABC):
    """The part of a task's class that the login node reads; see `slurmft.train.tasks.Task`."""

    facts: TaskFacts
    metric_names: tuple[str, ...] = ()
    """Names of the metrics; the first one decides which checkpoint is the best. (): those of
    `facts`."""
    Options: Any = None
    """Dataclass of the task's own options; None: it has none."""


def _read_tasks() -> dict[str, TaskFacts]:
    path = Path(__file__).with_name("tasks.toml")
    text = path.read_text(encoding="utf-8")
    tasks: dict[str, TaskFacts] = {}
    for name, table in tomllib.loads(text).items():
        values: dict[str, Any] = {}
        for key, value in table.items():
            if isinstance(value, list):  # TOML has no tuples
                value = tuple(value)
            values[key] = value
        tasks[name] = TaskFacts(**values)
    return tasks


TASKS = _read_tasks()
"""Name of each task that comes with slurmft -> its facts."""
