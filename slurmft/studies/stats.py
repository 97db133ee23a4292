"""Confidence intervals of ratios and differences, from repeats or from the windows of two runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

LEAST_WINDOWS = 10
_LEAST_INDEPENDENT = 2.0
ALIKE = 1e-9
"""Differences below it are rounding."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The steps of one run, in order, without warm-up."""

    steps: Array
    """Steps of each window, shape (windows,)."""
    sample_s: Array
    """Seconds of a sample, over all devices, shape (windows,)."""
    left_out: int = 0
    """Windows left out as warm-up."""


Interval = tuple[float, float, float]
"""An estimate, and the ends of its 95 % interval."""


# --- repeats --------------------------------------------------------------------------------------


def ratio_of_repeats(a_s: Array, b_s: Array) -> Interval:
    """Speed of B over that of A, from the times of repeats: Welch's t-interval of their logarithms.

    Args:
        a_s: seconds of the same work in each run of A, shape (repeats,).
        b_s: those of B, shape (repeats,).
    """
    estimate, low, high = difference_of_repeats(np.log(b_s), np.log(a_s))
    return math.exp(estimate), math.exp(low), math.exp(high)


def difference_of_repeats(a: Array, b: Array) -> Interval:
    """Mean of B minus mean of A: Welch's t-interval. Arrays of shape (repeats,)."""
    variances = [float(v.var(ddof=1)) / len(v) for v in (a, b)]
    half = _t_quantile(variances, [len(a), len(b)]) * math.sqrt(sum(variances))
    estimate = float(b.mean() - a.mean())
    return estimate, estimate - half, estimate + half


def _t_quantile(variances: Sequence[float], counts: Sequence[float]) -> float:
    """The 97.5 % quantile of Student's t for a difference of two means, with the degrees of freedom
    of Welch and Satterthwaite.

    Args:
        variances: of the means.
        counts: independent values behind each.
    """
    parts = sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    freedom = sum(variances) ** 2 / parts if parts else min(counts) - 1
    return float(stdtrit(freedom, 0.975))


# --- windows of steps -----------------------------------------------------------------------------


def ratio_of_windows(a: Sequence[Windows], b: Sequence[Windows]) -> Interval | None:
    """Speed of B over that of A, from the steps of one or two runs of each; None: too few.

    Neighbouring windows are slow together, so n of them count as fewer independent ones: as
    n (1 - rho) / (1 + rho), with their autocorrelation rho (Thiebaux and Zwiers 1984).

    Args:
        a: the windows of each run of A.
        b: those of B.
    """
    means, variances, counts = [], [], []
    for side in (a, b):
        steps = np.concatenate([w.steps for w in side])
        seconds = np.concatenate([w.steps * w.sample_s for w in side])
        if len(steps) < LEAST_WINDOWS:
            return None
        rho = autocorrelation(seconds / steps)
        independent = len(steps) * (1 - rho) / (1 + rho)
        if independent < _LEAST_INDEPENDENT:
            return None
        mean = float(seconds.sum() / steps.sum())
        relative = (seconds - mean * steps) / (mean * steps.mean())
        means.append(math.log(mean))
        variances.append(float(relative.var(ddof=1)) / independent)
        counts.append(independent)
    half = _t_quantile(variances, counts) * math.sqrt(sum(variances))
    estimate = means[0] - means[1]
    return math.exp(estimate), math.exp(estimate - half), math.exp(estimate + half)


def autocorrelation(values: Array) -> float:
    """The lag-one autocorrelation, with Kendall's correction of its bias, plus half its standard
    error: too small a value is the worse mistake.

    Args:
        values: in the order of time, shape (windows,).
    """
    count = len(values)
    centred = values - values.mean()
    variance = float((centred**2).sum())
    if variance <= (ALIKE * float(values.mean())) ** 2 * count:
        return 0.0
    rho = float((centred[1:] * centred[:-1]).sum()) / variance
    rho += (1 + 3 * rho) / count + 0.5 * math.sqrt((1 - rho**2) / count)
    return min(max(rho, 0.0), 0.9)


# --- shares of right answers ----------------------------------------------------------------------


def difference_of_shares(
    first: float, first_count: int, second: float, second_count: int
) -> tuple[float, float]:
    """The 95 % interval of the second share minus the first: as of independent normal values, with
    one right and one wrong answer more of each (Agresti and Caffo 2000).

    Args:
        first: share of right answers of the first.
        first_count: answers of it.
        second: the same of the second.
        second_count: the same of the second.
    """
    counts = np.array([first_count, second_count]) + 2
    shares = (np.array([first, second]) * (counts - 2) + 1) / counts
    half = 1.96 * math.sqrt(float((shares * (1 - shares) / counts).sum()))
    difference = float(shares[1] - shares[0])
    return difference - half, difference + half
