"""Metrics: predictions reach the main rank once, in memory; it computes, everybody knows."""

import importlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from slurmft.job.process_group import World
from slurmft.train.tasks.metrics import SCORES


def preload(names: Sequence[str]) -> None:
    """Imports what computing these metrics needs (up to 1.5 s), outside of any clock."""
    for name in names:
        if name in SCORES:
            importlib.import_module(SCORES[name].module)


def gather(world: World, array: np.ndarray, sizes: Sequence[int]) -> np.ndarray | None:
    """All ranks' arrays of (sizes[rank], ...), one after another, on the main rank; None elsewhere.
    By tensors: objects take ten times as long where ranks are many."""
    part = torch.from_numpy(array)
    sent = part.new_zeros(max(1, *sizes), *part.shape[1:])
    sent[: len(part)] = part
    received = [torch.empty_like(sent) for _ in sizes] if world.is_main else None
    dist.gather(sent, received, dst=0, group=world.control)
    if received is None:
        return None
    return np.concatenate([part[:size] for part, size in zip(received, sizes, strict=True)])
