"""--batch-size auto: how many samples at a time memory holds, tried out before the first step.

All ranks try the same sizes on the longest samples of the run, and agree after each. The global
batch stays, and what was tried leaves no trace: parameters, optimizer, random numbers and the order
of the data are as before.
"""

import contextlib
import math
import os
import re
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from slurmft.core.errors import SlurmftError
from slurmft.node import hardware
from slurmft.train.login import fitting_sizes
from slurmft.train.loop import memory_limits
from slurmft.train.loop.generators import kept_generators
from slurmft.train.loop.learner import Learner
from slurmft.train.loop.memory_limits import MemoryLimits
from slurmft.train.loop.out_of_memory import of_host_too, one_does_not_fit
from slurmft.train.loop.setup import Setup

_SHARE = 0.8
"""Part of a host's free memory that batches may take: who takes all is killed."""
_STATUS = Path("/proc/self/status")


def settled(setup: Setup, learner: Learner) -> Setup:
    """Returns the setup with the largest micro-batch that memory holds, the same on every rank;
    the setup as it is, where the size is set, or was found before."""
    if not setup.plan.is_auto or setup.memory_limits.train_samples is not None:
        return setup
    setup.job.alive("start")
    with kept_generators(setup.world.device):
        samples = _Search(setup, learner).largest()
    limits = replace(setup.memory_limits, train_samples=samples, tried_samples=None)
    held = MemoryLimits(train_samples=samples)
    setup.world.on_main(partial(memory_limits.note, setup.run_dir, held))
    plan = replace(setup.plan, memory_limit=samples)
    setup = replace(setup, memory_limits=limits, plan=plan)
    learner.settle(setup)
    return setup


class _Search:
    """The search for the largest micro-batch, as one rank takes part in it."""

    def __init__(self, setup: Setup, learner: Learner) -> None:
        self._setup = setup
        self._world = setup.world
        self._learner = learner
        lengths = setup.data.row_lengths(setup.data.train)
        # What memory holds of the longest, it holds of all.
        self._rows = np.argsort(-lengths, kind="stable")
        self._longest = int(lengths.max())
        # A rank's share of a step, at once.
        self._most = math.ceil(setup.plan.step_samples / setup.world.size)
        self._fits = 1
        self._host: _HostMemory | None = None

    def largest(self) -> int:
        """Returns the most samples that the memory of all ranks holds."""
        self._try_one()
        device = self._world.device
        # What the optimizer adds in the first step must find room beside a batch.
        moments_bytes = self._learner.new_moments_bytes
        moments = None
        if device.type == "cpu":
            self._host = _HostMemory(moments_bytes)
        with contextlib.suppress(torch.OutOfMemoryError):
            if device.type != "cpu":
                moments = torch.empty(moments_bytes, dtype=torch.uint8, device=device)
        has_room = device.type == "cpu" or moments is not None
        if not all(self._world.all_values(float(has_room))):
            raise one_does_not_fit(self._setup, self._longest)
        # Once more: a step has gradients already when its second micro-batch comes.
        self._try_one()
        self._grow()
        return self._fits

    def _try_one(self) -> None:
        if not self._try(1):
            raise one_does_not_fit(self._setup, self._longest)

    def _grow(self) -> None:
        """Looks for the largest size, within a factor of two."""
        if self._fits == self._most:
            return
        size = min(self._most, self._likely())
        if not self._try(size):
            while size // 2 > self._fits:
                size //= 2
                if self._try(size):
                    return
            return
        while self._fits < self._most:
            if not self._try(min(2 * self._fits, self._most)):
                return

    def _likely(self) -> int:
        """Returns the size that memory may hold; the same on every rank."""
        # Where a size that fails ends a rank, or the attempt, the last that fits is to be near.
        if self._host is not None or self._learner.computes_together:
            return 2 * self._fits
        remembered = self._world.on_main(
            lambda: fitting_sizes.remembered(self._setup.job.config)
        )
        return int(remembered or self._setup.config.usual_batch_size)

    def _try(self, size: int) -> bool:
        """Returns whether the memory of every rank holds so many samples."""
        if self._host is not None:
            may_hold = self._host.may_hold(size)
            if not all(self._world.all_values(float(may_hold))):
                return False
        # Where the kernel ends a rank all the same, the next start takes less.
        tried = MemoryLimits(tried_samples=size)
        self._world.on_main(partial(memory_limits.note, self._setup.run_dir, tried))
        holds = self._holds(size)
        if not all(self._world.all_values(float(holds))):
            return False
        if self._host is not None:
            self._host.note(size)
        self._fits = size
        self._setup.job.alive("start")
        return True

    def _holds(self, size: int) -> bool:
        """Returns whether this rank's memory holds so many samples."""
        holds = True
        try:
            with of_host_too():
                self._learner.try_out(self._rows[:size])
        except torch.OutOfMemoryError:
            holds = False
        # The error held what the pass had made.
        if not holds:
            # The others wait in the middle of the pass: they cannot agree on anything.
            if self._learner.computes_together:
                raise self._failed_alone(size)
            if self._world.device.type != "cpu":
                torch.get_device_module(self._world.device).empty_cache()
        return holds

    def _failed_alone(self, size: int) -> SlurmftError:
        """Returns the error of a rank that the others wait for: all start again, with a size that
        has fitted, if one has."""
        if size == 1:
            return one_does_not_fit(self._setup, self._longest)
        held = MemoryLimits(train_samples=self._fits)
        memory_limits.note(self._setup.run_dir, held)
        again = SlurmftError(
            f"--batch-size auto: memory does not hold {size} samples at a time",
            f"the ranks start again with {self._fits}: nothing to do",
        )
        again.retry = True
        return again


class _HostMemory:
    """The memory that this process may take on its host, and what batches have taken of it."""

    def __init__(self, reserved_bytes: int) -> None:
        """
        Args:
            reserved_bytes: what is to be left besides batches.
        """
        # Later the peak is that of a batch, not that of the model's start.
        # Where that cannot be, it counts too much, and sizes stay smaller.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = hardware.free_memory_bytes() // ranks
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - _bytes_of("VmSize"))
        self._free = int(_SHARE * free) - reserved_bytes
        # Both, or neither: without the peak, batches would seem to take nothing.
        self._before = _bytes_of("VmHWM") and _bytes_of("VmRSS")
        self._size = 0
        self._taken = 0

    def may_hold(self, size: int) -> bool:
        """Returns whether a batch is likely to fit, as far as smaller ones have shown."""
        if not self._size:
            return True
        # Some sandboxes do not say what a process has taken.
        if not self._before:
            return False
        return self._taken * size / self._size <= self._free

    def note(self, size: int) -> None:
        """Notes what a batch of a size has taken."""
        self._size = size
        self._taken = max(0, _bytes_of("VmHWM") - self._before)


def _bytes_of(name: str) -> int:
    """Returns a size that the kernel knows of this process; 0 where it does not say it."""
    status = ""
    with contextlib.suppress(OSError):
        status = _STATUS.read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    if match is None:
        return 0
    return int(match[1]) * 1024
