"""The optimizer and its schedule, in optimizer steps."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import get_scheduler

from slurmft.train.loop.state import Tensors
from slurmft.train.loop.step_plan import Plan

Groups = list[dict[str, Any]]
"""Settings of an optimizer, by the groups of its weights."""

_MOMENTUM = 0.95
"""Muon's."""

_TOGETHER = 2**26
"""Numbers of matrices that are made orthogonal together: large ones gain nothing by it."""


def make_optimizer(model: torch.nn.Module, plan: Plan, divided: bool = True) -> Optimizer:
    """The optimizer of the plan, on all weights that train. `divided` lets each rank do a part of
    Muon's work, where gradients are the same on all ranks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if plan.optimizer == "adamw":
        return AdamW(decay_groups(trained, plan), lr=plan.learning_rate, fused=True)
    hidden = hidden_matrices(model)
    taken = {id(p) for p in hidden}
    base = {id(p) for p in getattr(model, "base_model", model).parameters()}
    others = [p for p in trained if id(p) not in taken]
    slower = decay_groups([p for p in others if id(p) in base], plan)
    for group in slower:
        group["lr"] = plan.adamw_learning_rate
    head = decay_groups([p for p in others if id(p) not in base], plan)
    first = {"params": hidden, "weight_decay": plan.config.weight_decay}
    return MuonAdamW([first], [*slower, *head], plan.learning_rate, divided)


def steps_taken(optimizer: Optimizer) -> int:
    """Steps that moved weights: AdamW counts them on its device, where fp16 may skip some."""
    return max(int(state["step"]) for state in optimizer.state.values() if "step" in state)


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
    """Muon for the hidden matrices and PyTorch's AdamW for all other weights, as one: one state to
    save, one schedule, one step for fp16 to skip.

    Muon makes all singular values of a step nearly equal, so that weak directions move as far as
    strong ones: few steps get far. It computes what `torch.optim.Muon` does, of matrices of one
    shape together. Its steps are scaled to be as large as AdamW's, so that both take the same
    learning rate. To make a step orthogonal is work of its own. Every rank does it for a part of
    the matrices and sends them to the others; the momentum all ranks keep, whole.
    """

    def __init__(self, hidden: Groups, others: Groups, lr: float, divided: bool = True) -> None:
        self._adamw = AdamW(others, lr=lr, fused=True)
        self._divided = divided and dist.is_initialized() and dist.get_world_size() > 1
        self._count = len(hidden)
        ours = [{"lr": lr, "momentum": _MOMENTUM, **group} for group in hidden]
        super().__init__([*ours, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of both, on gradients that are the same on every rank."""
        assert closure is None
        # A schedule, or a resume, may have put other groups and another state here.
        self._adamw.state = self.state
        self._adamw.param_groups = self.param_groups[self._count :]
        self._adamw.step()
        for group in self.param_groups[: self._count]:
            if matrices := [p for p in group["params"] if p.grad is not None]:
                self._step_hidden(group, matrices)

    def _step_hidden(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        """Muon's step. Ranks send each other their directions, which are numbers of 16 bits."""
        gradients: list[Any] = [p.grad for p in matrices]
        for p in matrices:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        moments = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        parts = split(matrices, dist.get_world_size()) if self._divided else [matrices]
        own = parts[dist.get_rank() if self._divided else 0]
        found = self._directions(group["momentum"], own)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        for p, direction in share(parts, found) if self._divided else zip(own, found, strict=True):
            # As torch's match_rms_adamw scales a step.
            p.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _directions(self, momentum: float, matrices: list[Tensor]) -> list[Tensor]:
        """Of each matrix's step, in bf16."""
        found: dict[Tensor, Tensor] = {}
        for shape in {p.shape: None for p in matrices}:
            alike = [p for p in matrices if p.shape == shape]
            together = max(1, _TOGETHER // shape.numel())
            for i in range(0, len(alike), together):
                part: list[Any] = alike[i : i + together]
                moments = [self.state[p]["momentum_buffer"] for p in part]
                updates = torch._foreach_lerp([p.grad for p in part], moments, momentum)
                found |= zip(part, orthogonal(torch.stack(updates)), strict=True)
        return [found[p] for p in matrices]


def orthogonal(updates: Tensor) -> Tensor:
    """Matrices with the singular vectors of others, and singular values near 1: Newton-Schulz, as
    `torch.optim.Muon` has it: (n, rows, columns) -> the same in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = updates.shape[1] > updates.shape[2]
    x = updates.bfloat16().mT if is_tall else updates.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


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
    Yields each matrix, and what its rank had for it."""
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
    """Warm-up and decay in optimizer steps. Accelerate's scheduler advances by one step a rank."""
    config, total = plan.config, plan.total_steps
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * total)
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)


def split_optimizer(optimizer: Optimizer) -> tuple[Tensors, Groups]:
    """Returns an optimizer's state, which is of tensors alone, by "parameter.name"; and its
    settings."""
    whole = optimizer.state_dict()
    tensors: Tensors = {}
    for index, moments in whole["state"].items():
        for name, tensor in moments.items():
            tensors[f"{index}.{name}"] = tensor
    return tensors, whole["param_groups"]


def join_optimizer(optimizer: Optimizer, tensors: Tensors, groups: Groups) -> None:
    """Puts a state that `split_optimizer` took apart back into an optimizer."""
    state: dict[int, Tensors] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
