"""Local SGD (`--grad-comm local:K`): ranks train apart, and average their models every K steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BYTES_AT_ONCE = 2**24


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
        self._model, self._optimizer = model, optimizer
        self._averaged: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """All ranks have the same weights now: changes are counted from here."""
        self._averaged = {name: p.detach().clone() for name, p in self._weights()}

    @torch.no_grad()
    def average(self) -> None:
        """Weights and moments become their means over the ranks, the same to the last bit."""
        for name, weight in self._weights():
            weight.sub_(self._averaged[name])
        for part in _parts(b for b in self._model.buffers() if b.is_floating_point()):
            _average(part, part[0].dtype)
        for part in _parts(self._weights_and_moments()):
            _average(part, torch.bfloat16)
        for name, weight in self._weights():
            weight.add_(self._averaged[name])
        self.begin()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def _weights_and_moments(self) -> Iterator[Tensor]:
        for _, weight in self._weights():
            yield weight
            state = self._optimizer.state.get(weight, {})
            moments = (state[key] for key in sorted(state) if isinstance(state[key], Tensor))
            yield from (moment for moment in moments if moment.ndim)  # not the count of steps


def _average(part: list[Tensor], dtype: torch.dtype) -> None:
    """Tensors become their means over the ranks, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in part]).to(dtype)
    dist.all_reduce(flat)
    means = torch.split(flat, [tensor.numel() for tensor in part])
    for tensor, mean in zip(part, means, strict=True):
        tensor.copy_(mean.view_as(tensor)).div_(dist.get_world_size())


def _parts(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, in lists of some size."""
    part: list[Tensor] = []
    for tensor in tensors:
        if part and tensor.dtype != part[0].dtype:
            yield part
            part = []
        part.append(tensor)
        if sum(t.nbytes for t in part) >= _BYTES_AT_ONCE:
            yield part
            part = []
    if part:
        yield part
