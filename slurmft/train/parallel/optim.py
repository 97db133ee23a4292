"""The optimizer and its schedule, in optimizer steps; and its state, as files hold it."""

import math
import re
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from transformers import get_scheduler

from slurmft.train.loop.state import Tensors
from slurmft.train.loop.step_plan import Plan
from slurmft.train.parallel.muon import Groups, MuonAdamW

_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)",
    re.IGNORECASE,
)
"""Names of weights that do not decay, as transformers' Trainer has them."""


def make_optimizer(
    model: torch.nn.Module,
    plan: Plan,
    divided: bool = True,
) -> Optimizer:
    """Returns the optimizer of the plan, of all weights that train.

    Args:
        divided: see `MuonAdamW`.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decaying = decaying_weights(model)
    # Fused: a few kernels for all weights, where a plain loop has several for each.
    make_adamw = partial(
        AdamW,
        lr=plan.learning_rate,
        betas=(plan.config.adam_beta1, plan.config.adam_beta2),
        eps=plan.config.adam_epsilon,
        fused=True,
    )
    if plan.optimizer == "adamw":
        return make_adamw(decay_groups(trained, decaying, plan))
    hidden = hidden_matrices(model)
    # By identity: `==` of two weights compares their numbers.
    in_hidden = {id(p) for p in hidden}
    in_base = {id(p) for p in _base(model).parameters()}
    others = [p for p in trained if id(p) not in in_hidden]
    below_head = [p for p in others if id(p) in in_base]
    of_head = [p for p in others if id(p) not in in_base]
    # Embeddings, norms and biases learn at AdamW's rate; the head at Muon's.
    slower_groups = decay_groups(below_head, decaying, plan)
    for group in slower_groups:
        group["lr"] = plan.adamw_learning_rate
    head_groups = decay_groups(of_head, decaying, plan)
    muon_group = {"params": hidden, "weight_decay": plan.config.weight_decay}
    adamw = make_adamw([*slower_groups, *head_groups])
    return MuonAdamW([muon_group], adamw, plan.learning_rate, divided)


def steps_taken(optimizer: Optimizer) -> int:
    """Returns the steps that moved weights: AdamW counts them on its device, where fp16 may skip
    some."""
    # Muon's matrices have a momentum and no count.
    counts = []
    for state in optimizer.state.values():
        if "step" in state:
            counts.append(int(state["step"]))
    # The largest: a weight that got no gradients in a step counts none.
    return max(counts)


def decaying_weights(model: torch.nn.Module) -> set[int]:
    """Returns the identities of the weights that decay, by the rule of transformers' Trainer: no
    norms, and none whose name has "bias", such as the relative positions of T5 and MPNet."""
    in_norms: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            in_norms.update(map(id, module.parameters()))
    decaying = set()
    for name, weight in model.named_parameters():
        if id(weight) not in in_norms and not _NO_DECAY.search(name):
            decaying.add(id(weight))
    return decaying


def decay_groups(
    weights: list[torch.nn.Parameter],
    decaying: set[int],
    plan: Plan,
) -> Groups:
    """Returns weights in two groups: those that decay, and those that do not."""
    decayed = [p for p in weights if id(p) in decaying]
    others = [p for p in weights if id(p) not in decaying]
    return [
        {"params": decayed, "weight_decay": plan.config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the weights between embeddings and head: matrices of the base model that are no
    table, and that decay."""
    decaying = decaying_weights(model)
    in_tables = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            in_tables.add(id(module.weight))
    matrices = []
    for weight in _base(model).parameters():
        is_matrix = weight.ndim == 2 and id(weight) not in in_tables
        # XLNet has biases of two dimensions.
        if is_matrix and weight.requires_grad and id(weight) in decaying:
            matrices.append(weight)
    return matrices


def _base(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model below the head, as transformers knows it; of others the whole model."""
    base: torch.nn.Module = getattr(model, "base_model", model)
    return base


def make_scheduler(optimizer: Any, plan: Plan) -> Any:
    """Returns warm-up and decay in optimizer steps. Accelerate's scheduler would advance by one
    step a rank."""
    config = plan.config
    total = plan.total_steps
    warmup = config.warmup_steps
    if warmup is None:
        ratio = config.warmup_ratio or 0.0
        # Up, as transformers' Trainer: of 3 steps, a tenth is one.
        warmup = math.ceil(ratio * total)
    # transformers' "constant" has no warm-up.
    name = config.lr_schedule
    if name == "constant":
        name = "constant_with_warmup"
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
    )


def split_optimizer(optimizer: Optimizer) -> tuple[Tensors, Groups]:
    """Returns an optimizer's state, which is of tensors alone, by "parameter.name"; and its
    settings."""
    # torch numbers the weights there in the order of the groups.
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
