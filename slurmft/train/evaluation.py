"""Metrics: the main rank computes, everybody knows.

Predictions reach the main rank once, in memory. evaluate's own way, where every
rank writes its predictions into a file of a shared folder, is here for comparison, and for those
who need it.
"""

from __future__ import annotations

import importlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurmft.core.errors import SlurmftError
from slurmft.job.process_group import World
from slurmft.train.metrics import SCORES

Compute = Callable[[np.ndarray, np.ndarray], dict[str, float]]
"""Predictions (samples, ...) and references (samples,), in any order, to the metrics by name."""

NAN = -1
"""The class predicted where the logits are not numbers."""

_FILES_TIMEOUT_S = 60
"""How long evaluate waits for the files of other ranks, which begin at the same time."""


def check_numbers(predictions: np.ndarray) -> None:
    """Refuses predictions that come from logits that are not numbers.

    Raises:
        SlurmftError: there are such; a metric of them would look like one of a bad model.
    """
    is_bad = np.isnan(predictions) if predictions.dtype.kind == "f" else predictions == NAN
    bad = int(is_bad.reshape(len(predictions), -1).any(axis=1).sum())
    if bad:
        raise SlurmftError(
            f"the model's logits are NaN for {bad} of {len(predictions)} validation samples",
            "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32",
        )


def preload(names: Sequence[str]) -> None:
    """Imports what computing these metrics needs (up to 1.5 s), outside of any clock."""
    for name in names:
        if name in SCORES:
            importlib.import_module(SCORES[name].module)


def gather(world: World, array: np.ndarray, sizes: Sequence[int]) -> np.ndarray | None:
    """All ranks' arrays one after another, on the main rank; None elsewhere.

    By tensors: objects take ten times as long where ranks are many.

    Args:
        array: this rank's part, (sizes[rank], ...).
        sizes: the length of every rank's part.
    """
    part = torch.from_numpy(array)
    sent = part.new_zeros(max(1, *sizes), *part.shape[1:])
    sent[: len(part)] = part
    received = [torch.empty_like(sent) for _ in sizes] if world.is_main else None
    dist.gather(sent, received, dst=0, group=world.control)
    if received is None:
        return None
    return np.concatenate([part[:size] for part, size in zip(received, sizes, strict=True)])


def compute_by_files(
    world: World,
    folder: Path,
    predictions: np.ndarray,
    references: np.ndarray,
    compute: Compute,
) -> dict[str, float]:
    """The metrics, through evaluate's files: on the main rank; empty on the others.

    Args:
        folder: on a file system that all ranks see; made, and removed afterwards. Its file locks
            must hold between nodes (`slurmft.locks`).
        predictions: this rank's, int64 or float64, (its samples, ...): numbers or rows of them.
        references: what `compute` is to compare them with: int64 or float64, (its samples,).

    Raises:
        Exception: on the rank where evaluate failed.
        PeerFailedError: on the others.
    """
    # Its own for each metric object and job: under one name, one evaluation would read, or delete,
    # the files of another.
    name = world.share_object(secrets.token_hex(8))
    metrics: dict[str, float] = {}

    def work() -> None:
        metric = _evaluate_metric(
            predictions,
            references,
            compute,
            num_process=world.size,
            process_id=world.rank,
            experiment_id=name,
            cache_dir=str(folder),
            timeout=_FILES_TIMEOUT_S,
        )
        metric.add_batch(predictions=predictions, references=references)
        metrics.update(metric.compute() or {})

    try:
        # Also the barrier behind which the next evaluation cannot overtake this one.
        world.on_some(True, work)
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return metrics


def _evaluate_metric(
    predictions: np.ndarray, references: np.ndarray, compute: Compute, **where: Any
) -> Any:
    """An `evaluate.Metric` of our own: those of the hub are out of a compute node's reach."""
    import datasets
    import evaluate

    each = {"predictions": predictions, "references": references}
    columns = {name: datasets.Value(array.dtype.name) for name, array in each.items()}
    if predictions.ndim > 1:
        columns["predictions"] = datasets.Sequence(columns["predictions"])

    class Metric(evaluate.Metric):  # type: ignore[misc]
        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description="the metrics of a slurmft task",
                citation="",
                inputs_description="",
                features=datasets.Features(columns),
                format="numpy" if predictions.ndim == 1 else None,  # lists otherwise
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return compute(np.asarray(predictions), np.asarray(references))

    return Metric(**where)
