"""Local SGD (`--grad-comm local:K`): ranks train apart, and average their models every K steps."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PeriodicAveraging:
    """Averages weights and the optimizer's moments over all ranks.

    They are sent rounded to bf16. Of the weights the changes since the last average are sent:
    rounding loses a part of these changes, and nothing of the weights.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        """
        Args:
            model: where it is trained, with the same weights on all ranks.
            optimizer: torch's own, with a state for each weight.
        """
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """All ranks have the same weights now: changes are counted from here."""
        self._averaged = [p.detach().clone() for p in self._weights]

    @torch.no_grad()
    def average(self) -> None:
        """Weights and moments become their means over the ranks, the same to the last bit."""
        for weight, averaged in zip(self._weights, self._averaged, strict=True):
            weight.sub_(averaged)
        _average(self._buffers)
        _average([*self._weights, *self._moments()], torch.bfloat16)
        for weight, averaged in zip(self._weights, self._averaged, strict=True):
            weight.add_(averaged)
        self.begin()

    def _moments(self) -> list[Tensor]:
        states = (self._optimizer.state.get(weight, {}) for weight in self._weights)
        return [
            state[name]
            for state in states
            for name in sorted(state)
            if isinstance(state[name], Tensor) and state[name].ndim  # not the count of steps
        ]


def _average(tensors: list[Tensor], dtype: torch.dtype | None = None) -> None:
    """Tensors become their means over the ranks, in place; they are sent as `dtype`."""
    sent = [tensor.to(dtype or tensor.dtype) for tensor in tensors]
    for work in [dist.all_reduce(each, async_op=True) for each in sent]:
        work.wait()
    for tensor, total in zip(tensors, sent, strict=True):
        tensor.copy_(total).div_(dist.get_world_size())
