"""Losses that couple all rows of a global batch, as those whose negatives are the other rows.

Ranks exchange the vectors of their rows, not their texts. Each computes the losses of its own rows,
and what gradients these have with respect to the vectors of all; the sum over the ranks is what
each of them propagates through its model. So a global batch has the same loss and gradients on
every number of ranks. Where a rank has several micro-steps, it makes its vectors twice: first those
of all micro-steps, without a graph, then those of each once more, to propagate their gradients
(Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slurmft.job.process_group import World

Loss = Callable[[Tensor, int, int], Tensor]
"""See `Task.coupled_loss`."""


def loss_and_gradient(
    world: World,
    vectors: Tensor,
    counts: Sequence[int],
    loss: Loss,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of this rank's rows; and the gradient, with respect to their
    vectors, of the sum over all ranks. Called on every rank.

    Args:
        vectors: those of this rank's rows: (rows, ...).
        counts: number of rows of each rank.
    """
    first = sum(counts[: world.rank])
    count = counts[world.rank]
    everything = vectors.detach()
    if world.size > 1:
        everything = _gathered(everything, counts)
    everything.requires_grad_()
    with torch.enable_grad():
        own_loss = loss(everything, first, count)
    (gradient,) = torch.autograd.grad(own_loss, everything)
    if world.size > 1:
        dist.all_reduce(gradient)
    return own_loss.detach(), gradient[first : first + count]


def _gathered(vectors: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the vectors of all ranks, by rank."""
    # Collectives take tensors of one shape alone.
    sent = vectors.new_zeros(max(counts), *vectors.shape[1:])
    sent[: len(vectors)] = vectors
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent)
    parts = [part[:count] for part, count in zip(received, counts, strict=True)]
    return torch.cat(parts)
