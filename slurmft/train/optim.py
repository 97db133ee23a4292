"""The optimizer and its schedule, in optimizer steps."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

from slurmft.core.errors import UsageError
from slurmft.train.step_plan import Plan

Groups = list[dict[str, Any]]


def make_optimizer(
    model: torch.nn.Module, plan: Plan, fused: bool, divided: bool = True
) -> Optimizer:
    """The optimizer of the plan, on all weights that train.

    Args:
        fused: let AdamW work on all of its weights in one kernel.
        divided: let each rank do a part of Muon's work: gradients are the same on all ranks.

    Raises:
        UsageError: this torch has no Muon.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if plan.optimizer == "adamw":
        return AdamW(decay_groups(trained, plan), lr=plan.learning_rate, fused=fused)
    hidden = hidden_matrices(model)
    taken = {id(p) for p in hidden}
    base = {id(p) for p in getattr(model, "base_model", model).parameters()}
    others = [p for p in trained if id(p) not in taken]
    slower = decay_groups([p for p in others if id(p) in base], plan)
    for group in slower:
        group["lr"] = plan.adamw_learning_rate
    head = decay_groups([p for p in others if id(p) not in base], plan)
    return MuonAdamW(
        [{"params": hidden, "weight_decay": plan.config.weight_decay}],
        [*slower, *head],
        lr=plan.learning_rate,
        fused=fused,
        divided=divided,
    )


def decay_groups(weights: list[torch.nn.Parameter], plan: Plan) -> Groups:
    """Weights by whether they decay: biases and norms (one dimension) do not."""
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": plan.config.weight_decay},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights between embeddings and head: matrices of the base model that are no table."""
    base = getattr(model, "base_model", model)
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    in_tables = {id(p) for table in tables for p in table.parameters()}
    return [
        p for p in base.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in in_tables
    ]


class MuonAdamW(Optimizer):
    """PyTorch's Muon for the hidden matrices and its AdamW for all other weights, as one: one state
    to save, one schedule, one step for fp16 to skip.

    Muon makes all singular values of a step nearly equal, so that weak directions move as far as
    strong ones: few steps get far. Its steps are scaled to be as large as AdamW's, so that both
    take the same learning rate. To make a step orthogonal is work of its own. Every rank does it
    for a part of the matrices and sends them to the others; the momentum all ranks keep, whole.
    """

    def __init__(
        self, hidden: Groups, others: Groups, lr: float, fused: bool, divided: bool = True
    ) -> None:
        """See `torch.optim.Muon` and `AdamW`.

        Raises:
            UsageError: this torch has no Muon.
        """
        self._muon = _muon()(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(others, lr=lr, fused=fused)
        self._divided = divided and dist.is_initialized()
        self._count = len(self._muon.param_groups)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of both, on gradients that are the same on every rank."""
        assert closure is None
        # A schedule, or a resume, may have put other groups and another state here.
        self._muon.state = self._adamw.state = self.state
        self._adamw.param_groups = self.param_groups[self._count :]
        self._adamw.step()
        for group in self.param_groups[: self._count]:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if self._divided and dist.get_world_size() > 1:
                self._step_together(group, split(with_gradient, dist.get_world_size()))
            else:
                self._muon.param_groups = [{**group, "params": with_gradient}]
                self._muon.step()

    def _step_together(self, group: dict[str, Any], parts: list[list[Tensor]]) -> None:
        """Muon's step, of which each rank computes a part.

        Ranks send each other the directions, which are numbers of 16 bits, and move all weights.
        """
        own = parts[dist.get_rank()]
        moves = [torch.zeros_like(p) for p in own]  # what Muon does to zeros is its direction
        for move, p in zip(moves, own, strict=True):
            move.grad = p.grad
        self._muon.state = {move: self.state[p] for move, p in zip(moves, own, strict=True)}
        alike = {"lr": 1.0, "weight_decay": 0.0}
        self._muon.param_groups = [{**group, **alike, "params": moves}]
        self._muon.step()
        self._keep_momentum(group, [p for part in parts if part is not own for p in part])
        directions = [move.div_(-_step_size(p)) for move, p in zip(moves, own, strict=True)]
        for p, direction in share(parts, directions):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * _step_size(p))

    def _keep_momentum(self, group: dict[str, Any], theirs: list[Tensor]) -> None:
        """Muon's momentum of the matrices that other ranks update: any rank may save it."""
        for p in theirs:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            assert p.grad is not None
            state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])


def _muon() -> Any:
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(
            f"--optimizer muon needs torch 2.9 or later, and this is {torch.__version__}",
            "update torch, or use --optimizer adamw",
        )
    return torch.optim.Muon


def _step_size(matrix: Tensor) -> float:
    """Of a step at a learning rate of 1, as torch's match_rms_adamw has it."""
    return 0.2 * math.sqrt(max(matrix.shape))


def split(matrices: list[Tensor], ranks: int) -> list[list[Tensor]]:
    """The matrices of each rank: about as much work for each. The same on every rank."""
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for p in sorted(matrices, key=lambda p: -p.numel() * min(p.shape)):
        rank = loads.index(min(loads))
        parts[rank].append(p)
        loads[rank] += p.numel() * min(p.shape)
    return parts


def share(parts: list[list[Tensor]], own: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Sends what this rank has for its part of the matrices to all others: one broadcast a rank.

    Yields:
        Each matrix, and what its rank had for it.
    """
    flat = [
        torch.empty(sum(p.numel() for p in part), dtype=torch.bfloat16, device=part[0].device)
        for part in parts
        if part
    ]
    parts = [part for part in parts if part]  # of the first ranks
    if own:
        torch.cat([x.reshape(-1) for x in own], out=flat[dist.get_rank()])
    for work in [dist.broadcast(x, rank, async_op=True) for rank, x in enumerate(flat)]:
        work.wait()
    for part, whole in zip(parts, flat, strict=True):
        for p, piece in zip(part, torch.split(whole, [p.numel() for p in part]), strict=True):
            yield p, piece.view_as(p)


def make_scheduler(optimizer: Any, plan: Plan) -> Any:
    """Warm-up and decay in optimizer steps.

    It is not prepared by Accelerate, whose scheduler advances by one step a rank.
    """
    from transformers import get_scheduler

    config, total = plan.config, plan.total_steps
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * total)
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
