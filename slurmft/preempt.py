"""What the ranks agree on at every step boundary: to stop, or to save a checkpoint.

A signal reaches ranks at different moments; if each acted by itself, they would enter the
collective save at different steps, and hang. So they reduce their wishes. The reduction runs beside
the step, on a group of its own: the training loop never waits for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurmft.dist import World


@dataclass(frozen=True, slots=True)
class Decision:
    """The same on every rank."""

    signal: int
    """The signal that some rank received; 0: go on."""
    rank: int
    """Which rank it was."""
    save: bool
    """Save a checkpoint now."""


GO_ON = Decision(0, 0, False)


class StopAgreed(Exception):
    """All ranks stop here."""

    def __init__(self, decision: Decision) -> None:
        name = signal.Signals(decision.signal).name
        super().__init__(f"{name} on rank {decision.rank}")


class Boundary:
    """Asks before a step, and knows the answer after it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wishes = torch.zeros(3, dtype=torch.int64)
        self._work: Any = None

    def ask(self, stop_signal: int, save: bool) -> None:
        """Starts the reduction of every rank's wishes."""
        rank = self._world.rank + 1 if stop_signal else 0
        self._wishes = torch.tensor([stop_signal, rank, int(save)])
        self._work = dist.all_reduce(
            self._wishes, dist.ReduceOp.MAX, group=self._world.control, async_op=True
        )

    def decide(self) -> Decision:
        """Waits for the answer, which has long been there when a step took its time."""
        self._work.wait()
        stop_signal, rank, save = self._wishes.tolist()
        return Decision(stop_signal, rank - 1, bool(save))
