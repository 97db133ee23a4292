"""The optimizer and its schedule, in optimizer steps."""

from __future__ import annotations

from typing import Any

import torch

from slurmft.config import TrainConfig


def make_optimizer(
    model: torch.nn.Module, config: TrainConfig, fused: bool
) -> torch.optim.Optimizer:
    """AdamW; biases and norms (one dimension) do not decay."""
    assert config.learning_rate is not None  # from the recipe
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def make_scheduler(optimizer: Any, config: TrainConfig, total_steps: int) -> Any:
    """Warm-up and decay in optimizer steps.

    It is not prepared by Accelerate, whose scheduler advances by one step a rank.
    """
    from transformers import get_scheduler

    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * total_steps)
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)
