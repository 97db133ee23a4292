"""How far a run has come."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from slurmft.train.loop.state import State

Phase = Literal["train", "evaluate", "done", "test"]


@dataclass(slots=True)
class Position:
    """How far a run has come: all that decides what it does next. The same on every rank."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs whose training is done."""
    batch: int = 0
    """Optimizer steps done in the current epoch."""
    phase: Phase = "train"
    """train; evaluate, now and then; done; test, once after all that."""
    evaluated: int = 0
    """The optimizer step of the last evaluation; 0: there was none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the last evaluation."""
    by_class: dict[str, Any] = field(default_factory=dict)
    """The classes of the last evaluation, see `Task.by_class`."""
    test: dict[str, float] = field(default_factory=dict)
    """The metrics of the test split, of the model that is saved."""
    best: float | None = None
    """The best value of the task's first metric."""
    since_best: int = 0
    """Evaluations since the best one."""
    missing_since_best: int = 0
    """How many of them had no value to compare, see `note_missing`."""

    def state(self) -> State:
        return State(dataclasses.asdict(self))

    def load(self, state: State) -> None:
        # In place: the trainer holds this object.
        for name, value in state.values.items():
            setattr(self, name, value)

    def note_evaluation(self, value: float, lower_is_better: bool) -> bool:
        """Counts an evaluation by its first metric. Returns whether it was the best so far."""
        if self._improves(value, lower_is_better):
            self.best = value
            self.since_best = 0
            self.missing_since_best = 0
            return True
        self.since_best += 1
        return False

    def note_missing(self) -> None:
        """Counts an evaluation whose first metric failed: it is not the best, and says nothing
        about whether training still helps."""
        self.since_best += 1
        self.missing_since_best += 1

    def _improves(self, value: float, lower_is_better: bool) -> bool:
        # No comparison with NaN is true: as the first value it would stay the best for good.
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        if lower_is_better:
            return value < self.best
        return value > self.best
