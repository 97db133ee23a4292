"""Metrics: the main rank computes, everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slurmft.dist import PeerFailedError, World


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of predictions that equal their labels; both int, (samples,)."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def preload() -> None:
    """Imports what computing needs, outside of any clock (1.5 s)."""
    import sklearn.metrics  # noqa: F401


def share_metrics(
    world: World,
    names: Sequence[str],
    compute: Callable[[], dict[str, float]],
    lap: Callable[[str], None],
) -> dict[str, float]:
    """Computes metrics on the main rank and broadcasts them as one tensor to every rank.

    Args:
        names: the metrics' names, the same on every rank.
        compute: called on the main rank alone.
        lap: told "metric" and "broadcast" as each phase ends.

    Raises:
        Exception: on the main rank, whatever `compute` raises.
        PeerFailedError: on the others, if it raised there. Nobody hangs.
    """
    values, error = [0.0] * len(names), None
    if world.is_main:
        try:
            found = compute()
            values = [found[name] for name in names]
        except Exception as caught:
            error = caught
    lap("metric")
    failed, *values = world.broadcast([float(error is not None), *values], 1 + len(names))
    lap("broadcast")
    if error is not None:
        raise error
    if failed:
        raise PeerFailedError("the metric failed on the main rank")
    return dict(zip(names, values, strict=True))
