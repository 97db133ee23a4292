"""The order of samples in an epoch, and batches that are made while the device computes.

The order belongs to the global batch: which samples make up a step does not depend on how many
ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from slurmft.train.data.tables import Array

if TYPE_CHECKING:
    import torch

BUCKET_STEPS = 50
"""Number of steps whose samples are sorted by length together."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def epoch_order(samples: int, seed: int, epoch: int) -> Array:
    """Returns the order of an epoch: a permutation that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def drawn_rows(size: int, count: int, seed: int, source: int, epoch: int) -> Array:
    """Returns the rows of a source of --mix that an epoch has; they depend on the arguments alone.

    Each epoch goes on where the one before has ended: no row comes a second time in a run before
    all rows have come.

    Args:
        size: rows of the source.
        count: rows that an epoch takes.
        source: number of the source, from 0.
    """
    first = epoch * count
    end = first + count
    parts = []
    for turn in range(first // size, (end - 1) // size + 1):
        # The third number tells these generators from those of the order.
        random = np.random.default_rng([seed, turn, 2 + source])
        start = turn * size
        in_turn = slice(max(first - start, 0), end - start)
        parts.append(random.permutation(size)[in_turn])
    return np.concatenate(parts)


def mixed_rows(
    sizes: Sequence[int],
    counts: Sequence[int],
    seed: int,
    epoch: int,
) -> Array:
    """Returns the rows of the training data that an epoch has: all of the first source, and those
    that are drawn of others.

    Args:
        sizes: rows of each source; they lie one after the other.
        counts: rows of each source that an epoch takes.
    """
    rows = [np.arange(sizes[0])]
    first = sizes[0]
    for source, (size, count) in enumerate(zip(sizes[1:], counts[1:], strict=True)):
        rows.append(first + drawn_rows(size, count, seed, source, epoch))
        first += size
    return np.concatenate(rows)


def bucket_by_length(
    order: Array,
    lengths: Array,
    size: int,
    seed: int,
    epoch: int,
) -> Array:
    """Returns an order in which the samples of a step have similar lengths (length bucketing).

    Within buckets of `BUCKET_STEPS` steps samples are sorted by length; then the steps are
    shuffled, so that lengths do not grow through a bucket. The step with too few samples stays the
    last.

    Args:
        order: the order of the epoch: int64, (samples,).
        lengths: tokens of every sample of the split: int64, (samples,).
        size: samples of a step.
    """
    bucket = BUCKET_STEPS * size
    steps: list[Array] = []
    for start in range(0, len(order), bucket):
        part = order[start : start + bucket]
        # Stable, so that the order of equal lengths is the shuffled one on every machine.
        by_length = np.argsort(lengths[part], kind="stable")
        part = part[by_length]
        for first in range(0, len(part), size):
            steps.append(part[first : first + size])
    whole_steps = len(order) // size
    # The third number tells this generator from that of `epoch_order`.
    random = np.random.default_rng([seed, epoch, 1])
    ordered_steps = [steps[i] for i in random.permutation(whole_steps)]
    return np.concatenate(ordered_steps + steps[whole_steps:])


def prepared(
    items: Iterable[_Item],
    make: Callable[[_Item], _Result],
    device: torch.device,
) -> Iterator[tuple[_Item, _Result]]:
    """Yields items, each with what `make` returns for it.

    For a GPU a thread calls `make`, one item ahead; a CPU has no time to spare for that. The thread
    leaves the GPU alone.

    Raises:
        Exception: whatever `make` raises, when its item's turn comes.
    """
    if device.type == "cpu":
        for item in items:
            yield item, make(item)
        return
    # One thread: batches are made in order, and no more than one waits in memory.
    with ThreadPoolExecutor(1, "batches") as thread:
        ahead: list[tuple[_Item, Future[_Result]]] = []
        for item in items:
            # Submitted before the item of the step before is handed out.
            ahead.append((item, thread.submit(make, item)))
            if len(ahead) > 1:
                first, future = ahead.pop(0)
                yield first, future.result()
        for item, future in ahead:
            yield item, future.result()
