"""The state of a part of a training, as it goes into a checkpoint and comes back from it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class State:
    """The state of one part, at one step boundary."""

    values: dict[str, Any] = field(default_factory=dict)
    """What JSON can hold; of the main rank alone."""
    tensors: dict[str, Tensors] = field(default_factory=dict)
    """File name without suffix -> name -> tensor; of the main rank alone."""
    shares: Tensors = field(default_factory=dict)
    """Tensors of which each rank has its share (`slurmft.train.parallel.sharding`)."""
    checkpoint: Path | None = None
    """Where it was read from: shares are still there."""


class Part(Protocol):
    """A part of a training that a checkpoint holds the state of."""

    def state(self) -> State:
        """Returns the state as it is now. Called on every rank, after the same step."""

    def load(self, state: State) -> None:
        """Continues from a state. Called on every rank, with what the main rank read."""
