"""Gradient communication (`--grad-comm`): DDP, its communication hooks, and what they leave to us.

DDP sums gradients during the backward pass. Here less is sent. Of an embedding table few rows have
a gradient, and only these are summed: the result is exact. The other gradients are sent as they are
(fp32), or rounded (bf16). With local SGD (local:K) no gradients are sent: the ranks average their
models every K steps.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from slurmft.core.errors import SlurmftError
from slurmft.job.process_group import World
from slurmft.train.config import local_steps
from slurmft.train.local_sgd import PeriodicAveraging
from slurmft.train.sparse_embeddings import Tables, broadcast_weights

_BUCKETS, _BUCKET_MIB = 8, 25
"""Parts in which gradients are sent, as the backward pass makes them; and their largest size."""
_TRIAL_STEPS = 4
"""Steps after which auto chooses; the first one is not measured."""
_PROBE_NUMBERS = 2 * 2**20
"""Numbers in an all-reduce that is timed, at most."""
_GAIN = 0.03
"""Of a step's time: what bf16 must save to be chosen."""
_POOR = 0.5
"""Of a step's time: where an all-reduce takes more, it cannot hide behind the backward pass."""


class GradientCommunication:
    """Gradient communication, as one rank takes part in it."""

    def __init__(self, asked: str, world: World, precision: str) -> None:
        """
        Args:
            asked: auto, fp32, bf16 or local:K.
            precision: fp32, bf16 or fp16.

        Raises:
            SlurmftError: in fp16, ranks that train apart would skip different steps, those that
                overflow.
        """
        self.world, self.precision = world, precision
        alone = world.size == 1
        self.period = 1 if alone else local_steps(asked) or 1
        """Optimizer steps after which all ranks have the same weights: K of local SGD, else 1."""
        self.used = "none" if alone else "fp32" if asked == "auto" else asked
        if precision == "fp16" and self.period > 1:
            raise SlurmftError(
                f"--grad-comm {asked} cannot be used with fp16",
                "use --precision bf16 or fp32, or --grad-comm auto",
            )
        self.tables: Tables | None = None
        self._step_ends: list[float] | None = [] if asked == "auto" and not alone else None
        """Of the first steps, as long as auto has not chosen."""
        self._averaging: PeriodicAveraging | None = None
        self._has_local_steps = False
        self._model: Any = None

    def prepare(self, accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Model and optimizer as Accelerate prepares them, with the same weights on all ranks."""
        self._model = model
        if self.used == "none" or self.period > 1:
            return self._prepare_without_ddp(accelerator, model, optimizer)
        if self.world.device.type == "cpu":
            self.tables = Tables.of(model)
        model._ddp_params_and_buffers_to_ignore = self._ignored(model)  # DDP's own name
        accelerator.ddp_handler = self._ddp_options()
        model, optimizer = accelerator.prepare(model, optimizer)
        self._hook(model)
        return model, optimizer

    def _prepare_without_ddp(self, accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """The same without DDP: one rank, or local SGD."""
        if self.used != "none":
            broadcast_weights(model.state_dict().values())
        prepared = accelerator.prepare_model(model, evaluation_mode=True)  # on its device
        if self.used != "none":
            self._averaging = PeriodicAveraging(model, optimizer)
        return prepared, accelerator.prepare(optimizer)

    def _ignored(self, model: Any) -> list[str]:
        """Names of what DDP leaves alone: our tables, and buffers that cannot differ.

        Those of batch norms may; numbers of positions, as BERT has, would be sent before every
        forward pass for nothing.
        """
        names = list(self.tables.modules) if self.tables else []
        if not any(b.is_floating_point() for b in model.buffers()):
            names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
        return names

    def _ddp_options(self) -> DistributedDataParallelKwargs:
        mib = min(_BUCKET_MIB, -(-self._numbers * 4 // (_BUCKETS * 2**20)))
        return DistributedDataParallelKwargs(bucket_cap_mb=mib, gradient_as_bucket_view=True)

    @property
    def _numbers(self) -> int:
        """Gradients that DDP sums."""
        tables = {id(m.weight) for m in self.tables.modules.values()} if self.tables else set()
        others = (p for p in self._model.parameters() if p.requires_grad and id(p) not in tables)
        return sum(p.numel() for p in others)

    def _hook(self, model: DistributedDataParallel) -> None:
        """Tells DDP how to sum a bucket."""
        if self.used == "bf16" or (self._step_ends is not None and self.precision == "bf16"):
            # DDP wants no annotations, or classes; ours are texts.
            model.register_comm_hook(self, lambda state, bucket: _sum_bucket(state, bucket))

    # --- in a step --------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Sums over ranks what DDP did not. After the last backward pass of an optimizer step."""
        if self.tables:
            self.tables.sum(self.world.size)

    def forget(self) -> None:
        """The last backward pass was a dry run."""
        if self.tables:
            self.tables.forget()

    def is_synchronized_after(self, step: int) -> bool:
        """Whether all ranks have the same weights after this optimizer step, counted from 1."""
        return step % self.period == 0

    def end_step(self, step: int, record: Callable[[dict[str, Any]], None]) -> None:
        """After optimizer step `step`: averages the models if it is time, or chooses what to send.

        Args:
            record: called with what was measured and chosen.
        """
        self._has_local_steps = self.period > 1
        if self.is_synchronized_after(step):
            self.average()
        if self._step_ends is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # in these few steps alone
        self._step_ends.append(time.perf_counter())
        if len(self._step_ends) == _TRIAL_STEPS:
            steps_s = (end - begin for begin, end in itertools.pairwise(self._step_ends))
            self._choose(statistics.median(steps_s), record)
            self._step_ends = None

    # --- auto -------------------------------------------------------------------------------------

    def _choose(self, step_s: float, record: Callable[[dict[str, Any]], None]) -> None:
        """Chooses what is fastest without a loss of accuracy; the same on all ranks."""
        own = [step_s, *(self._probe_s(dtype) for dtype in (torch.float32, torch.bfloat16))]
        measured = Measured(*(v / self.world.size for v in self.world.sum(own)))
        self.used = measured.choice(self.precision)
        summary = measured.summary(self.precision, self._numbers)
        record({"used": self.used, "words": summary, "mean_s": measured.as_json()})

    def _probe_s(self, dtype: torch.dtype) -> float:
        """Seconds to sum all gradients of DDP, sent as `dtype`, beside nothing else."""
        whole = self._numbers
        sample = torch.zeros(min(whole, _PROBE_NUMBERS), device=self.world.device)
        times = []
        for _ in range(4):
            self.world.sum([0.0])  # all ranks begin together; and a GPU has nothing left to do
            began = time.perf_counter()
            sent = sample.to(dtype)
            dist.all_reduce(sent)
            sample.copy_(sent)
            sample[-1].item()  # a GPU has done it then
            times.append(time.perf_counter() - began)
        return min(times[1:]) * whole / len(sample)

    # --- local:K ----------------------------------------------------------------------------------

    @torch.no_grad()
    def average(self) -> None:
        """Averages the ranks' models and their optimizers' moments, where they differ.

        A checkpoint holds both: they must be the same on every rank.
        """
        if self._averaging and self._has_local_steps:
            self._averaging.average()
        self._has_local_steps = False

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resume needs, as JSON can hold it; the same on every rank."""
        return {"used": self.used if self._step_ends is None else None}

    def restore(self, state: dict[str, Any], same_ranks: bool) -> None:
        """Continues from `state`; with another number of ranks auto chooses anew.

        The model has the checkpoint's weights already.
        """
        if self._averaging:
            self._averaging.begin()
        if self._step_ends is not None and same_ranks and state["used"]:
            self.used, self._step_ends = state["used"], None

    def facts(self) -> dict[str, Any]:
        """For the result: what was used at the end."""
        return {"used": self.used, "rows": list(self.tables.modules) if self.tables else []}


def _sum_bucket(
    communication: GradientCommunication, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """A hook for DDP that can change what it sends: DDP takes one hook only."""
    group = dist.group.WORLD
    assert group is not None
    if communication.used == "bf16":
        return default_hooks.bf16_compress_hook(group, bucket)
    return default_hooks.allreduce_hook(group, bucket)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a step that sends fp32, and of all-reduces alone; means over the ranks."""

    step: float
    fp32: float
    bf16: float

    def choice(self, precision: str) -> str:
        """Rounds to bf16 only gradients that were computed in bf16 anyway."""
        gains = self.fp32 - self.bf16 > _GAIN * self.step
        return "bf16" if precision == "bf16" and gains else "fp32"

    def summary(self, precision: str, numbers: int) -> str:
        """What was measured and chosen, in a line; and what a poor network calls for."""
        used = self.choice(precision)
        taken = self.bf16 if used == "bf16" else self.fp32
        step = max(0.0, self.step - (self.fp32 - taken))
        text = (
            f"{used}: a step took {self.step:.3g} s, an all-reduce of {numbers / 1e6:.3g}M "
            f"gradients alone {self.fp32:.3g} s in fp32, {self.bf16:.3g} s in bf16"
        )
        if taken > _POOR * step:
            more = "" if precision == "bf16" else "bf16 or "
            text += (
                f"; the network is poor for this model: --grad-comm {more}local:64 would send "
                "less, but train in another way"
            )
        return text

    def as_json(self) -> dict[str, float]:
        return {"step": self.step, "all_reduce_fp32": self.fp32, "all_reduce_bf16": self.bf16}
