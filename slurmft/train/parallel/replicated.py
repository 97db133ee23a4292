"""Strategies by which every rank keeps the whole model: alone, or by DDP (`--grad-comm`).

DDP sums gradients during the backward pass. They are sent as they are (fp32), or rounded (bf16;
what auto takes in a bf16 run, which computes most of them in bf16). With local SGD (local:K, in
`local_sgd`) no gradients are sent: the ranks average their models every K steps.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from slurmft.job import Job
from slurmft.job.process_group import World
from slurmft.train.engine import lora
from slurmft.train.loop.checkpoint import Saver
from slurmft.train.loop.state import State, Tensors
from slurmft.train.parallel.optim import join_optimizer, split_optimizer
from slurmft.train.parallel.strategy import TrainedModel

_BUCKETS = 8
"""Parts in which gradients are sent, as the backward pass makes them."""
_BUCKET_MIB = 25
"""The largest size of a part."""


def rounding(grad_comm: str, precision: str) -> str:
    """Returns how gradients are sent, where --grad-comm may say auto: fp32 or bf16."""
    if grad_comm == "auto":
        return "bf16" if precision == "bf16" else "fp32"
    return grad_comm


class Replicated:
    """What is common to strategies by which every rank keeps the whole model; a checkpoint is what
    the main rank has."""

    sends = "none"
    keeps_whole_model = True
    sends_every_micro_step = False
    evaluates_together = False
    has_equal_gradients = True

    def __init__(self, world: World) -> None:
        self.world = world

    def load_model(self, load: Callable[[], None]) -> None:
        load()

    def divide(self, model: Any) -> None:
        """Leaves the model whole."""

    def clip_grad_norm_(self, weights: list[torch.Tensor], norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(weights, norm)

    def is_synchronized_after(self, step: int) -> bool:
        return True

    def end_step(self, step: int) -> None:
        """Does nothing: all ranks made the same step."""

    def synchronize(self) -> None:
        """Does nothing: all ranks have the same model."""

    def saver(self, job: Job) -> Saver:
        return Saver(job, self.world)

    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> State:
        tensors, groups = split_optimizer(optimizer)
        return State({"optimizer": groups}, {"model": lora.trained(model), "optimizer": tensors})

    def load(self, model: TrainedModel, optimizer: torch.optim.Optimizer, state: State) -> None:
        self.load_weights(model, state)
        join_optimizer(optimizer, state.tensors["optimizer"], state.values["optimizer"])

    def load_weights(self, model: TrainedModel, state: State) -> None:
        model.load(state.tensors["model"])

    def restored(self, rehearse: Callable[[], None]) -> None:
        """Does nothing: what was loaded is all."""

    def collect_weights(self, folder: Path) -> None:
        """Does nothing: the main rank has them."""

    def collected_weights(self, folder: Path) -> Tensors | None:
        return None


class Alone(Replicated):
    """One rank, which has nobody to send to."""

    def wrap(self, accelerator: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        return accelerator.prepare_model(model, evaluation_mode=True)


class Ddp(Replicated):
    """Ranks sum their gradients by torch's DistributedDataParallel."""

    def __init__(self, world: World, sends: str) -> None:
        """
        Args:
            sends: fp32 or bf16.
        """
        super().__init__(world)
        self.sends = sends

    def wrap(self, accelerator: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        model._ddp_params_and_buffers_to_ignore = _ignored(model)  # DDP's own name
        accelerator.ddp_handler = _ddp_options(model)
        ddp = accelerator.prepare_model(model)
        if self.sends == "bf16":
            # By another name: DDP refuses this hook without NCCL.
            ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return ddp

    def restored(self, rehearse: Callable[[], None]) -> None:
        # DDP lays out its buckets anew after the first backward pass. A sum over ranks rounds by
        # the place in the bucket: without a rehearsal, the first step after a resume would differ
        # in its last bits from the same step of a run that was never interrupted.
        rehearse()


def _ignored(model: Any) -> list[str]:
    """Returns the names of the buffers that DDP need not send, as they cannot differ between ranks.

    Those of batch norms may; numbers of positions, as BERT has, would be sent before every
    forward pass for nothing.
    """
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        return []
    return [name for name, _ in model.named_buffers(remove_duplicate=False)]


def _ddp_options(model: Any) -> DistributedDataParallelKwargs:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Small models are sent in several parts, too: the first while the backward pass goes on.
    bucket_mib = math.ceil(trained * 4 / (_BUCKETS * 2**20))
    bucket_mib = min(_BUCKET_MIB, bucket_mib)
    return DistributedDataParallelKwargs(bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
