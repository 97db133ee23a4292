"""Gradient communication (`--grad-comm`): DDP and its communication hooks, or local SGD.

DDP sums gradients during the backward pass. They are sent as they are (fp32), or rounded (bf16;
what auto takes in a bf16 run, which computes most of them in bf16). With local SGD (local:K) no
gradients are sent: the ranks average their models every K steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from slurmft.core.errors import SlurmftError
from slurmft.job.process_group import World
from slurmft.train.config import local_steps
from slurmft.train.parallel.local_sgd import PeriodicAveraging

_BUCKETS, _BUCKET_MIB = 8, 25
"""Parts in which gradients are sent, as the backward pass makes them; and their largest size."""


class GradientCommunication:
    """Gradient communication, as one rank takes part in it."""

    def __init__(self, asked: str, world: World, precision: str) -> None:
        """
        Args:
            asked: auto, fp32, bf16 or local:K.
            precision: fp32, bf16 or fp16.
        """
        self.world = world
        alone = world.size == 1
        self.period = 1 if alone else local_steps(asked) or 1
        """Optimizer steps after which all ranks have the same weights: K of local SGD, else 1."""
        auto = "bf16" if precision == "bf16" else "fp32"
        self.used = "none" if alone else auto if asked == "auto" else asked
        if precision == "fp16" and self.period > 1:  # ranks would skip different steps
            raise SlurmftError(
                f"--grad-comm {asked} cannot be used with fp16",
                "use --precision bf16 or fp32, or --grad-comm auto",
            )
        self._averaging: PeriodicAveraging | None = None
        self._has_local_steps = False

    def prepare(self, accelerator: Any, model: Any, optimizer: Any) -> Any:
        """The model as Accelerate prepares it, on its device, with the same weights on all ranks.

        Args:
            optimizer: torch's own, of this model: Accelerate's looks for packages in every step.
        """
        if self.used == "none":
            return accelerator.prepare_model(model, evaluation_mode=True)
        if self.period > 1:
            prepared = accelerator.prepare_model(model, evaluation_mode=True)
            for tensor in model.state_dict().values():  # on its device: nccl sends no other
                dist.broadcast(tensor, src=0)
            self._averaging = PeriodicAveraging(model, optimizer)
            return prepared
        model._ddp_params_and_buffers_to_ignore = _ignored(model)  # DDP's own name
        accelerator.ddp_handler = _ddp_options(model)
        ddp = accelerator.prepare_model(model)
        if self.used == "bf16":
            # By another name: DDP refuses this hook without NCCL.
            ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return ddp

    # --- in a step --------------------------------------------------------------------------------

    def clip_grad_norm_(self, weights: list[torch.Tensor], norm: float) -> torch.Tensor:
        """Clips the gradients to a norm; returns what it was: a scalar, on their device."""
        return torch.nn.utils.clip_grad_norm_(weights, norm)

    def is_synchronized_after(self, step: int) -> bool:
        """Whether all ranks have the same weights after this optimizer step, counted from 1."""
        return step % self.period == 0

    def end_step(self, step: int) -> None:
        """After optimizer step `step`: averages the models if it is time."""
        self._has_local_steps = self.period > 1
        if self.is_synchronized_after(step):
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Averages the ranks' models and their optimizers' moments, where they differ: a checkpoint
        holds both."""
        if self._averaging and self._has_local_steps:
            self._averaging.average()
        self._has_local_steps = False

    def restored(self) -> None:
        """The model has the weights of a checkpoint now."""
        if self._averaging:
            self._averaging.begin()

    def facts(self) -> dict[str, Any]:
        """For the result: what was used at the end."""
        return {"used": self.used}


def _ignored(model: Any) -> list[str]:
    """Names of the buffers that DDP need not send, as they cannot differ between ranks.

    Those of batch norms may; numbers of positions, as BERT has, would be sent before every
    forward pass for nothing.
    """
    if any(b.is_floating_point() for b in model.buffers()):
        return []
    return [name for name, _ in model.named_buffers(remove_duplicate=False)]


def _ddp_options(model: Any) -> DistributedDataParallelKwargs:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    mib = min(_BUCKET_MIB, -(-trained * 4 // (_BUCKETS * 2**20)))
    return DistributedDataParallelKwargs(bucket_cap_mb=mib, gradient_as_bucket_view=True)
