"""Clocks: where the time of a run goes, and how much of a step is a rank's own work."""

import time
from collections import deque
from typing import Any

import torch


class PhaseClock:
    """Adds up the wall time of named phases. Each phase ends with its work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "metric": 0.0, "broadcast": 0.0}
        self._device = torch.get_device_module(device)
        self._phase: str | None = None
        self._since = time.perf_counter()

    def enter(self, phase: str | None) -> None:
        """Ends the phase under way, and begins another. Time in None is counted to no phase."""
        self.mark()
        self._phase = phase

    def mark(self) -> None:
        """Counts the time of the phase under way up to now."""
        # Else the device's work would count to a later phase. For a CPU it does nothing.
        self._device.synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._since = now


class OwnClock:
    """How long a rank computes by itself: its forward passes in training, in which it waits for
    nobody. The backward pass ends with the slowest rank's, on all ranks alike."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Measures `model`: what the parallel wrapper calls, after its own exchanges."""
        self._device = device
        self._passes: deque[tuple[Any, Any]] = deque()
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def seconds(self) -> float:
        """Returns the seconds of the passes since the last call. Passes that the device is still
        computing are left for the next call: nothing waits."""
        seconds = 0.0
        while self._passes:
            began, ended = self._passes[0]
            if not ended.query():
                # nor have those after it: a device does what it is given in order
                break
            seconds += seconds_between(began, ended)
            self._passes.popleft()
        return seconds

    def _begin(self, model: torch.nn.Module, _: Any) -> None:
        # Evaluations have passes, too, which are no part of a step.
        self._began = None
        if model.training:
            self._began = now(self._device)

    def _end(self, model: torch.nn.Module, _: Any, __: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, now(self._device)))


class CpuEvent:
    """An event of a CPU, as torch has them for GPUs. A CPU has done what it was given before."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Returns milliseconds."""
        return 1000 * (end.time - self.time)


def now(device: torch.device) -> Any:
    """Returns an event, which passes when the device has done all that it was given."""
    if device.type == "cpu":
        return CpuEvent()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Returns the seconds between two events; waits for the second."""
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
