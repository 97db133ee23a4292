"""Local SGD (`--grad-comm local:K`): ranks train apart, and average their models every K steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmft.job.process_group import World
from slurmft.train.parallel.replicated import Replicated


class LocalSgd(Replicated):
    """Ranks train apart for K steps, and average their models then."""

    has_equal_gradients = False

    def __init__(self, world: World, period: int) -> None:
        """
        Args:
            period: K, the optimizer steps after which all ranks have the same weights.
        """
        super().__init__(world, f"local:{period}")
        self._period = period
        self._has_local_steps = False
        self._averaging: PeriodicAveraging | None = None

    def wrap(
        self,
        accelerator: Any,
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> Any:
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        # No DDP, which would do so: all ranks begin with the weights of the main one. They are on
        # their device by now: nccl sends nothing from elsewhere.
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        self._averaging = PeriodicAveraging(model, optimizer)
        return prepared

    def is_synchronized_after(self, step: int) -> bool:
        return step % self._period == 0

    def end_step(self, step: int) -> None:
        self._has_local_steps = True
        if self.is_synchronized_after(step):
            self.synchronize()

    def synchronize(self) -> None:
        """Averages the ranks' models and their optimizers' moments, where they differ: a checkpoint
        holds both."""
        if self._averaging and self._has_local_steps:
            self._averaging.average()
        self._has_local_steps = False

    def restored(self, rehearse: Callable[[], None]) -> None:
        # The changes that are sent next are those since the checkpoint.
        if self._averaging:
            self._averaging.begin()


class PeriodicAveraging:
    """Averages weights and the optimizer's moments over all ranks.

    They are sent rounded to bf16. Of the weights the changes since the last average are sent:
    rounding loses a part of these changes, and nothing of the weights.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        """
        Args:
            model: where it is trained, with the same weights on all ranks.
            optimizer: torch's own, not Accelerate's, with a state for each weight.
        """
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """Counts changes from here on, where all ranks have the same weights."""
        self._averaged = [p.detach().clone() for p in self._weights]

    @torch.no_grad()
    def average(self) -> None:
        """Makes weights and moments their means over the ranks, the same to the last bit."""
        # In place, so that no third copy of the weights is in memory.
        for weight, averaged in zip(self._weights, self._averaged, strict=True):
            weight.sub_(averaged)
        # Buffers, as the means of batch norms, are small: they are sent unrounded.
        _average(self._buffers)
        _average([*self._weights, *self._moments()], torch.bfloat16)
        for weight, averaged in zip(self._weights, self._averaged, strict=True):
            weight.add_(averaged)
        self.begin()

    def _moments(self) -> list[Tensor]:
        """Returns the optimizer's tensors, in an order that is the same on every rank."""
        moments = []
        for weight in self._weights:
            state = self._optimizer.state.get(weight, {})
            for _, value in sorted(state.items()):
                if value.ndim:  # not the count of steps
                    moments.append(value)
        return moments


def _average(tensors: list[Tensor], dtype: torch.dtype | None = None) -> None:
    """Makes tensors their means over the ranks, in place; they are sent as `dtype`."""
    sent = []
    sums = []
    for tensor in tensors:
        rounded = tensor.to(dtype or tensor.dtype)
        sent.append(rounded)
        # All are under way before the first is waited for.
        sums.append(dist.all_reduce(rounded, async_op=True))
    for work in sums:
        work.wait()
    world_size = dist.get_world_size()
    for tensor, total in zip(tensors, sent, strict=True):
        tensor.copy_(total).div_(world_size)
