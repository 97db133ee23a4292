"""Dropout on CPUs: its random numbers four at a time.

torch draws one number for each element, one after another, where it does not have MKL's generator
(it has it on Intel's processors alone): dropout then takes a sixth of a training step. Here each
draw of 64 bits decides for four elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_STEPS = 2**16
"""A probability is a multiple of 1 / this."""


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        numbers = draws.view(torch.int16)[: x.numel()].view(x.shape)
        factors = torch.empty_like(x)  # torch compares into it fast, and converts slowly
        torch.ge(numbers, dropped - _STEPS // 2, out=factors).mul_(_STEPS / (_STEPS - dropped))
        ctx.save_for_backward(factors)
        return x * factors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factors,) = ctx.saved_tensors
        return gradients[0] * factors, None


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes elements with probability p, to the nearest 1/65536, and scales the others up.

    On other devices than CPUs it is torch's own.
    """
    dropped = round(p * _STEPS)
    if x.device.type != "cpu" or dropped == _STEPS:
        return torch.nn.functional.dropout(x, p)
    found: Tensor = _Dropout.apply(x, dropped) if dropped else x  # type: ignore[no-untyped-call]
    return found


class Dropout(torch.nn.Dropout):
    """torch's module with this dropout."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


def replace(model: torch.nn.Module) -> None:
    """Puts this dropout in place of torch's in a model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, Dropout(child.p))
