"""Strategies by which every rank keeps the whole model: alone, or by DDP (`--grad-comm`).

DDP sums gradients during the backward pass. They are sent as they are (fp32), or rounded (bf16;
what auto takes in a bf16 run, which computes most of them in bf16). With local SGD (local:K, in
`local_sgd`) no gradients are sent: the ranks average their models every K steps.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from slurmft.job import Job
from slurmft.train.engine import freezing
from slurmft.train.loop.checkpoint import Saver
from slurmft.train.loop.state import State
from slurmft.train.parallel.optim import join_optimizer, split_optimizer
from slurmft.train.parallel.strategy import Strategy, TrainedModel

_BUCKETS = 8
"""Parts in which gradients are sent, as the backward pass makes them."""
_BUCKET_MIB = 25
"""The largest size of a part."""


class Replicated(Strategy):
    """What is common to strategies by which every rank keeps the whole model; a checkpoint is what
    the main rank has."""

    def saver(self, job: Job) -> Saver:
        return Saver(job, self.world)

    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> State:
        tensors, groups = split_optimizer(optimizer)
        trained = freezing.trained(model)
        return State({"optimizer": groups}, {"model": trained, "optimizer": tensors})

    def load(
        self,
        model: TrainedModel,
        optimizer: torch.optim.Optimizer,
        state: State,
    ) -> None:
        self.load_weights(model, state)
        join_optimizer(optimizer, state.tensors["optimizer"], state.values["optimizer"])

    def load_weights(self, model: TrainedModel, state: State) -> None:
        model.load(state.tensors["model"])


class Alone(Replicated):
    """One rank, which has nobody to send to."""

    def wrap(
        self,
        accelerator: Any,
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> Any:
        return accelerator.prepare_model(model, evaluation_mode=True)


class Ddp(Replicated):
    """Ranks sum their gradients by torch's DistributedDataParallel."""

    waits_for_all_gradients = True

    def wrap(
        self,
        accelerator: Any,
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> Any:
        accelerator.ddp_handler = _ddp_options(model, self.may_lack_gradients)
        ddp = accelerator.prepare_model(model)
        if self.sends == "bf16":
            # By another name: DDP refuses this hook without NCCL.
            ddp.register_comm_hook(
                None, lambda group, bucket: bf16_compress_hook(group, bucket)
            )
        return ddp

    def restored(self, rehearse: Callable[[], None]) -> None:
        # DDP lays out its buckets anew after the first backward pass. A sum over ranks rounds by
        # the place in the bucket: without a rehearsal, the first step after a resume would differ
        # in its last bits from the same step of a run that was never interrupted.
        rehearse()


def _ddp_options(
    model: Any,
    may_lack_gradients: bool,
) -> DistributedDataParallelKwargs:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Small models are sent in several parts, too: the first while the backward pass goes on.
    # A gradient in fp32 has 4 bytes; in whichever format they are sent, buckets hold these.
    bucket_mib = math.ceil(trained * 4 / (_BUCKETS * 2**20))
    return DistributedDataParallelKwargs(
        bucket_cap_mb=min(_BUCKET_MIB, bucket_mib),
        # Means of batch norms differ between ranks. Other buffers do not, as BERT's numbers of
        # positions: they would be sent before every forward pass for nothing.
        broadcast_buffers=any(buffer.is_floating_point() for buffer in model.buffers()),
        # Gradients lie in the buckets themselves: there is no second copy of them.
        gradient_as_bucket_view=True,
        # Each step then looks through its graph for weights that get none.
        find_unused_parameters=may_lack_gradients,
    )
