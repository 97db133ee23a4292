"""Clocks: where the time of a run goes, and what of a step is a rank's own work."""

import time
from collections import deque
from typing import Any

import torch


class PhaseClock:
    """Adds up the wall time of named phases, one after the other; each ends with its work on the
    device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "metric": 0.0, "broadcast": 0.0}
        self._device = torch.get_device_module(device)
        self.restart()

    def restart(self) -> None:
        """Begins a phase: time since the last one belongs to none."""
        self._device.synchronize()  # nothing, for the CPU
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Ends a phase, and begins the next."""
        before = self._since
        self.restart()
        self.seconds[phase] += self._since - before


class OwnClock:
    """How long a rank computes by itself: its forward passes in training, in which it waits for
    nobody. The backward pass ends with the slowest rank's, on all ranks alike.

    On GPUs events in the stream measure, which are read when they have passed: nothing waits.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Measures `model`: what the parallel wrapper calls, after its own exchanges."""
        self._device = device
        self._began: Any = None
        self._seconds = 0.0
        self._passes: deque[tuple[Any, Any]] = deque()
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def seconds(self) -> float:
        """What was measured since the last call."""
        while self._passes and self._passes[0][1].query():
            self._seconds += seconds_between(*self._passes.popleft())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, model: torch.nn.Module, _: Any) -> None:
        self._began = now(self._device) if model.training else None

    def _end(self, model: torch.nn.Module, _: Any, __: Any) -> None:
        if self._began is None:
            return
        ended = now(self._device)
        if self._device.type == "cpu":
            self._seconds += ended - self._began
        else:
            self._passes.append((self._began, ended))


def now(device: torch.device) -> Any:
    """Seconds; of a GPU an event, which passes when the GPU has done all that it was given."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def has_passed(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Of two that `now` returned; waits for the second."""
    if isinstance(ended, float):
        return ended - float(began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
