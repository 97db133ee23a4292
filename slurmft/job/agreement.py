"""What the ranks agree on between steps: to stop, or to save a checkpoint.

A signal reaches ranks at different moments; if each acted by itself, they would enter the
collective save at different steps, and hang. So they reduce their wishes. The reduction runs beside
the step, on a group of its own (what it costs: results/overhead.py).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurmft.job.process_group import World


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

_ASK_EVERY_S, _MOST_STEPS = 0.5, 50
"""How long a stop may wait for the next question, and for how many steps at most."""


class StopAgreed(Exception):
    """All ranks stop here."""

    def __init__(self, decision: Decision) -> None:
        name = signal.Signals(decision.signal).name
        super().__init__(f"{name} on rank {decision.rank}")


class Boundary:
    """Asks before a step, and knows the answer after it.

    Short steps share a question: the main rank proposes how many, from the time that they take, and
    the answer carries the proposal to all ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._wishes = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None
        self._steps = self._left = 0
        self._asked_at: float | None = None

    def begin(self) -> None:
        """A new kind of step begins, on every rank: its first one asks, whatever was agreed."""
        self._left, self._asked_at = 0, None

    def ask(self, stop_signal: int, save: bool) -> None:
        """Starts the reduction of every rank's wishes, if this step is one that asks."""
        self._work = None
        if self._left:
            self._left -= 1
            return
        rank = self._world.rank + 1 if stop_signal else 0
        self._wishes = torch.tensor([stop_signal, rank, int(save), self._proposal()])
        self._work = dist.all_reduce(
            self._wishes, dist.ReduceOp.MAX, group=self._world.control, async_op=True
        )

    def decide(self) -> Decision:
        """Waits for the answer, which has long been there when a step took its time."""
        if self._work is None:
            return GO_ON
        self._work.wait()
        stop_signal, rank, save, self._steps = self._wishes.tolist()
        self._left = self._steps - 1
        return Decision(stop_signal, rank - 1, bool(save))

    def _proposal(self) -> int:
        """Steps until the next question; the main rank's counts."""
        before, self._asked_at = self._asked_at, time.monotonic()
        if not self._world.is_main or before is None:
            return 1
        step_s = (self._asked_at - before) / max(1, self._steps)
        return max(1, min(_MOST_STEPS, int(_ASK_EVERY_S / max(step_s, 1e-6))))
