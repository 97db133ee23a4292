"""Dropout on CPUs by fewer random numbers; and the heap of a process, which must not grow.

torch draws one number for each element, one after another, where it does not have MKL's generator
(it has it on Intel's processors alone): dropout then takes a sixth of a training step. Here each
draw of 64 bits decides for four elements.
"""

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_STEPS = 2**16
"""A probability is a multiple of 1 / this."""


# --- dropout --------------------------------------------------------------------------------------


def draw_factors(count: int, p: float, dtype: torch.dtype) -> Tensor:
    """Returns factors of dropout: 0 with probability p, else 1 / (1 - p).

    The probability is rounded to the nearest 1/65536.
    """
    dropped = round(p * _STEPS)
    draws = torch.empty(math.ceil(count / 4), dtype=torch.int64)
    # Without an upper bound: all 64 bits are random.
    draws.random_(-(2**63), None)
    # uniform, from -_STEPS / 2 to _STEPS / 2 - 1
    numbers = draws.view(torch.int16)[:count]
    # Compared into the type of the factors: torch does that fast, and converts slowly.
    factors = torch.empty(count, dtype=dtype)
    torch.ge(numbers, dropped - _STEPS // 2, out=factors)
    return factors.mul_(_STEPS / (_STEPS - dropped))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        factors = draw_factors(x.numel(), p, x.dtype).view(x.shape)
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
    if not dropped:
        return x
    output: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return output


class Dropout(torch.nn.Dropout):
    """torch's module with this dropout."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        return dropout(input, self.p)


def replace_dropout(model: torch.nn.Module) -> None:
    """Puts this dropout in place of torch's in a model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, Dropout(child.p))


# --- memory ---------------------------------------------------------------------------------------

KEEPS = "MALLOC_TRIM_THRESHOLD_"
"""Environment variable by which a profile makes glibc keep all memory that was freed."""
_SETTLING_BATCHES = 8
"""Batches after which memory in use is what batches need."""
_GROWTH = 1.3
"""Most that memory may grow to from then on, as a multiple."""


class Heap:
    """The heap of this process.

    Args:
        environment: without `KEEPS` in it glibc gives memory back by itself.
        trim: gives free memory back to the kernel; None: glibc's function.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        trim: Callable[[], object] | None = None,
    ) -> None:
        self._trim = None
        if environment.get(KEEPS):
            self._trim = trim or glibc_trim()
        self._batches = 0
        self._limit_bytes = 0.0

    def after_batch(self) -> None:
        """Gives free memory back where much of it has gathered; costs the next batch page faults.

        The first batches after that show what batches need: so it is at most done every few.
        """
        if self._trim is None:
            return
        self._batches += 1
        if self._batches < _SETTLING_BATCHES:
            return
        resident = resident_bytes()
        if self._batches == _SETTLING_BATCHES:
            self._limit_bytes = _GROWTH * resident
        elif resident > self._limit_bytes:
            self._trim()
            self._batches = 0


def glibc_trim() -> Callable[[], object] | None:
    """Returns glibc's malloc_trim; None: this is another C library, or another allocator is
    preloaded."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return None
    return lambda: malloc_trim(0)  # 0: no reserve stays at the top of the heap


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
