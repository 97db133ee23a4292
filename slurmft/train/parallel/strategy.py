"""How ranks share a training: what each keeps of the model, and what they send each other."""
# ruff: noqa: B027 - some methods need do nothing: most strategies keep the ranks' weights the same.

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from slurmft.job import Job
from slurmft.job.process_group import World
from slurmft.train.loop.checkpoint import Saver
from slurmft.train.loop.state import State, Tensors


class TrainedModel(Protocol):
    """A model, as strategies know it."""

    model: Any
    """What transformers made."""

    def load(self, weights: Tensors) -> None:
        """Takes all weights that train."""


class Strategy(ABC):
    """How one rank takes part in a training. All ranks make the same calls.

    Methods with a body are those of a rank that has the whole model and the same weights as all
    others after every step; a strategy that works otherwise has its own.
    """

    keeps_whole_model = True
    """So its vocabulary can be trimmed and its layers computed together."""
    sends_every_micro_step = False
    """Whole gradients, not yet sent, would need the memory that sharding saves."""
    evaluates_together = False
    """A rank without samples computes, too: the others wait for its shares."""
    waits_for_all_gradients = False
    """A weight that the loss does not use must be known beforehand: the others wait for it."""
    has_equal_gradients = True
    """All ranks have the same gradients when the optimizer makes its step."""

    def __init__(self, world: World, sends: str = "none") -> None:
        """
        Args:
            sends: what ranks send each other: none, or gradients as fp32 or bf16, or models by
                local:K.
        """
        self.world = world
        self.sends = sends
        self.may_lack_gradients = False
        """Weights have no gradients in some steps, or in any."""

    # --- a model becomes what trains --------------------------------------------------------------

    def load_model(self, load: Callable[[], None]) -> None:
        """Has this rank load its model, and divide it."""
        load()

    def divide(self, model: Any) -> None:
        """Leaves this rank its share of a model that is whole; here, all of it."""

    @abstractmethod
    def wrap(
        self,
        accelerator: Any,
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> Any:
        """Returns the model as it is called in training: on its device, in the run's precision,
        with the same weights on all ranks."""

    # --- in a step --------------------------------------------------------------------------------

    def clip_grad_norm_(self, weights: list[torch.Tensor], norm: float) -> torch.Tensor:
        """Clips the gradients to a norm. Returns what it was: a scalar, on their device."""
        return torch.nn.utils.clip_grad_norm_(weights, norm)

    def is_synchronized_after(self, step: int) -> bool:
        """Returns whether all ranks have the same model after an optimizer step, counted from 1."""
        return True

    def end_step(self, step: int) -> None:
        """Does what follows optimizer step `step`; here, nothing."""

    def synchronize(self) -> None:
        """Makes all ranks' models the same, where they differ."""

    # --- checkpoints ------------------------------------------------------------------------------

    @abstractmethod
    def saver(self, job: Job) -> Saver:
        """Returns what writes the checkpoints."""

    @abstractmethod
    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> State:
        """Returns all that trains, and the optimizer's state."""

    @abstractmethod
    def load(
        self,
        model: TrainedModel,
        optimizer: torch.optim.Optimizer,
        state: State,
    ) -> None:
        """Takes a state back, by whatever number of ranks it was written."""

    @abstractmethod
    def load_weights(self, model: TrainedModel, state: State) -> None:
        """Takes back all that trains; the optimizer stays as it is."""

    def restored(self, rehearse: Callable[[], None]) -> None:
        """Does what follows the load of a state; here, nothing. `rehearse` is a backward pass that
        changes no weight."""

    # --- the whole model --------------------------------------------------------------------------

    def collect_weights(self, folder: Path) -> None:
        """Brings all weights to the main rank, by files in `folder` where they are divided."""

    def collected_weights(self, folder: Path) -> Tensors | None:
        """Returns what `collect_weights` brought, on the main rank; None: the model has them.

        Raises:
            OSError, SafetensorError: there was no room for the files.
        """
        return None
