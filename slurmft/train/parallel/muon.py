"""Muon for the hidden matrices of a model, with AdamW for all other weights beside it.

Muon makes all singular values of a step nearly equal, so that weak directions move as far as strong
ones: few steps get far. Here it computes what `torch.optim.Muon` does, to the last bit on one rank.
It stays because ranks divide the work: torch's makes every step orthogonal on every rank, which
takes 1.8 times as long on two ranks (results/measured/by_hand.md).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

Groups = list[dict[str, Any]]
"""Settings of an optimizer, by the groups of its weights."""

_MOMENTUM = 0.95
_TOGETHER = 2**26
"""Numbers of matrices that are made orthogonal together: large ones gain nothing by it."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration, as `torch.optim.Muon` has them."""
_ITERATIONS = 5
_LIKE_ADAMW = 0.2
"""torch's `match_rms_adamw` scales a step so that it is as large as AdamW's."""


class MuonAdamW(Optimizer):
    """Muon and PyTorch's AdamW as one optimizer: one state to save, one schedule, one step for fp16
    to skip.

    Steps of both are about as large, so that both take the same learning rate. To make a step
    orthogonal is work of its own: every rank does it for a part of the matrices, and sends them to
    the others. All ranks keep the whole momentum.
    """

    def __init__(
        self,
        hidden: Groups,
        adamw: AdamW,
        lr: float,
        divided: bool = True,
    ) -> None:
        """
        Args:
            hidden: groups of matrices, for Muon.
            adamw: the optimizer of all other weights.
            divided: each rank does a part of Muon's work: gradients are the same on all ranks.
        """
        self._adamw = adamw
        self._divided = divided and dist.is_initialized() and dist.get_world_size() > 1
        self._hidden_groups = len(hidden)
        groups = [{"lr": lr, "momentum": _MOMENTUM, **group} for group in hidden]
        # AdamW's groups are the same dictionaries here: a schedule sets the rates of both.
        super().__init__([*groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes one step of both."""
        assert closure is None
        # A resume's `load_state_dict` puts new objects here: AdamW must not step with the old ones.
        self._adamw.state = self.state
        self._adamw.param_groups = self.param_groups[self._hidden_groups :]
        self._adamw.step()
        for group in self.param_groups[: self._hidden_groups]:
            matrices = [p for p in group["params"] if p.grad is not None]
            if matrices:
                self._step_hidden(group, matrices)

    def _step_hidden(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        """Makes one step of Muon on the matrices of a group."""
        # Of all matrices on every rank, so that a checkpoint of the main rank has all of it.
        self._update_momentum(group["momentum"], matrices)
        directions = self._all_directions(group["momentum"], matrices)
        # The weights decay apart from the gradients, as AdamW's do.
        rate = group["lr"]
        decay = rate * group["weight_decay"]
        torch._foreach_mul_(matrices, 1 - decay)
        for matrix, direction in directions:
            longer_side = max(matrix.shape)
            scale = _LIKE_ADAMW * math.sqrt(longer_side)
            matrix.add_(direction, alpha=-rate * scale)

    def _update_momentum(self, momentum: float, matrices: list[Tensor]) -> None:
        for matrix in matrices:
            state = self.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
        gradients: list[Any] = [matrix.grad for matrix in matrices]
        torch._foreach_lerp_(self._momenta(matrices), gradients, 1 - momentum)

    def _momenta(self, matrices: list[Tensor]) -> list[Tensor]:
        return [self.state[matrix]["momentum_buffer"] for matrix in matrices]

    def _all_directions(
        self,
        momentum: float,
        matrices: list[Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns each matrix with the direction of its step, in 16 bits."""
        if not self._divided:
            return zip(matrices, self._directions(momentum, matrices), strict=True)
        parts = split(matrices, dist.get_world_size())
        own_part = parts[dist.get_rank()]
        return share(parts, self._directions(momentum, own_part))

    def _directions(self, momentum: float, matrices: list[Tensor]) -> list[Tensor]:
        """Returns the direction of each matrix's step, computed on this rank."""
        directions: dict[Tensor, Tensor] = {}
        shapes = dict.fromkeys(matrix.shape for matrix in matrices)
        for shape in shapes:
            # Matrices of one shape are stacked: one product then computes all of them.
            alike = [matrix for matrix in matrices if matrix.shape == shape]
            # At least 1: a matrix may be larger than the limit by itself.
            count = max(1, _TOGETHER // shape.numel())
            for start in range(0, len(alike), count):
                batch = alike[start : start + count]
                gradients: list[Any] = [matrix.grad for matrix in batch]
                # Nesterov's momentum, (1 - m) gradient + m momentum: a step looks ahead.
                updates = torch._foreach_lerp(gradients, self._momenta(batch), momentum)
                stacked = orthogonal(torch.stack(updates))
                for matrix, direction in zip(batch, stacked, strict=True):
                    directions[matrix] = direction
        return [directions[matrix] for matrix in matrices]


def orthogonal(updates: Tensor) -> Tensor:
    """Returns matrices with the singular vectors of others, and singular values near 1.

    By Newton-Schulz iterations, as `torch.optim.Muon` has them.

    Args:
        updates: (n, rows, columns).

    Returns:
        (n, rows, columns), in bf16.
    """
    a, b, c = _COEFFICIENTS
    is_tall = updates.shape[1] > updates.shape[2]
    x = updates.bfloat16()
    # The transpose of a tall matrix has the smaller Gram matrix: less work.
    if is_tall:
        x = x.mT
    # The iteration needs singular values of at most 1, which dividing by the Frobenius norm gives.
    norms = x.norm(dim=(1, 2), keepdim=True)
    # A matrix without gradients has the norm 0: it stays 0, where 0 / 0 would be NaN.
    x = x / norms.clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        # x becomes a x + (b G + c G G) x, where G is its Gram matrix.
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if is_tall:
        x = x.mT
    return x


def split(matrices: list[Tensor], ranks: int) -> list[list[Tensor]]:
    """Returns the matrices of each rank: about as much work for each. The same on every rank."""
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    # Greedy: the largest matrix that is left goes to the rank with the least work.
    loads = [0] * ranks
    # The most work first, and of equals the first of the model: `sorted` keeps their order.
    for matrix in sorted(matrices, key=_work, reverse=True):
        rank = loads.index(min(loads))
        parts[rank].append(matrix)
        loads[rank] += _work(matrix)
    return parts


def _work(matrix: Tensor) -> int:
    """Returns how much work it is to make a matrix orthogonal, but for a factor."""
    return matrix.numel() * min(matrix.shape)


def share(
    parts: list[list[Tensor]], own_directions: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sends what this rank has for its part of the matrices to all others, by one broadcast a rank.
    Yields each matrix, and what its rank had for it."""
    # Where matrices are fewer than ranks, `split` gives them to the first ranks: so the index of a
    # part that has some is the rank that sends it.
    filled = [part for part in parts if part]
    buffers = []
    sent = []
    for rank, part in enumerate(filled):
        size = sum(matrix.numel() for matrix in part)
        buffer = torch.empty(size, dtype=torch.bfloat16, device=part[0].device)
        if rank == dist.get_rank():
            own_numbers = [direction.reshape(-1) for direction in own_directions]
            torch.cat(own_numbers, out=buffer)
        buffers.append(buffer)
        # All are under way before the first is waited for.
        sent.append(dist.broadcast(buffer, rank, async_op=True))
    for work in sent:
        work.wait()
    for part, buffer in zip(filled, buffers, strict=True):
        sizes = [matrix.numel() for matrix in part]
        pieces = torch.split(buffer, sizes)
        for matrix, piece in zip(part, pieces, strict=True):
            yield matrix, piece.view_as(matrix)
