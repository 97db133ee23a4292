"""Agreement of the ranks between two steps: an all-reduce of stop and checkpoint requests.

A signal reaches ranks at different moments. If each acted by itself, they would enter the
collective save at different steps, and hang. The all-reduce runs beside the step, on a group of its
own (what it costs: results/benchmarks/overhead.py). A job of one rank needs none, and no torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmft.job.process_group import World


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of all ranks after a step."""

    signal: int
    """The stop signal that some rank received; 0: none did."""
    rank: int
    """The rank that received it."""
    save: bool
    """A checkpoint is to be saved."""


_NOTHING = Decision(0, 0, False)

_REDUCE_EVERY_S = 0.5
"""How long a request may wait for the next all-reduce."""
_MAX_STEPS = 50
"""How many steps a request may wait for it at most."""


class Boundary:
    """Starts the all-reduce before a step, and has its result after it.

    Short steps share one: the main rank proposes for how many, from the time that they take, and
    the all-reduce carries the proposal to all ranks.
    """

    def __init__(self, world_size: int, join: "Callable[[], World]") -> None:
        """
        Args:
            join: joins the process group; called by the first `request` of more than one rank.
        """
        self._world_size = world_size
        self._join = join
        self._decision: Decision | None = None
        self._requests: Any = None
        self._work: Any = None
        self._steps = 0
        """Steps that share the last all-reduce."""
        self._skip = 0
        """Steps left of those."""
        self._reduced_at: float | None = None

    def begin_phase(self) -> None:
        """Makes the next step have an all-reduce on every rank: the steps to come may be longer."""
        self._skip = 0
        self._reduced_at = None

    def request(self, stop_signal: int, save: bool) -> None:
        """Starts the all-reduce of this rank's requests, unless this step shares an earlier one."""
        self._work = None
        self._decision = _NOTHING
        if self._world_size == 1:
            self._decision = Decision(stop_signal, 0, save)
        elif self._skip:
            self._skip -= 1
        else:
            self._start(stop_signal, save)

    def _start(self, stop_signal: int, save: bool) -> None:
        import torch  # not above: a job of one rank needs none
        import torch.distributed as dist

        world = self._join()
        # The maximum of all ranks: 0 is no signal, no rank, no checkpoint.
        rank = 0
        if stop_signal:
            rank = world.rank + 1
        steps = 1  # the least: the main rank's proposal is the maximum
        if world.is_main:
            steps = self._proposal()
        self._requests = torch.tensor([stop_signal, rank, int(save), steps])
        self._work = dist.all_reduce(
            self._requests, dist.ReduceOp.MAX, group=world.control, async_op=True
        )

    def decide(self) -> Decision:
        """Waits for the all-reduce, which has long ended when a step took its time."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            stop_signal, rank, save, self._steps = self._requests.tolist()
            # As all ranks have read it: one that skipped fewer would wait for the others in vain.
            self._skip = self._steps - 1
            self._decision = Decision(stop_signal, rank - 1, bool(save))
        assert self._decision is not None  # `request` comes first
        return self._decision

    def _proposal(self) -> int:
        """Returns how many steps are to share the next all-reduce; the main rank's counts."""
        before = self._reduced_at
        self._reduced_at = time.monotonic()
        if before is None:
            return 1
        step_s = (self._reduced_at - before) / max(1, self._steps)
        steps = int(_REDUCE_EVERY_S / max(step_s, 1e-6))
        return max(1, min(_MAX_STEPS, steps))
