"""Confidence intervals of ratios and differences, from repeats or from the windows of two runs."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

LEAST_WINDOWS = 10
_LEAST_INDEPENDENT = 2.0
ALIKE = 1e-9
"""Differences below it are rounding."""


Interval = tuple[float, float, float]
"""An estimate, and the ends of its 95 % interval."""


# --- repeats --------------------------------------------------------------------------------------


def ratio_of_repeats(a_s: Array, b_s: Array) -> Interval:
    """Speed of B over that of A: Welch's t-interval of the logarithms of the seconds that each run
    took for the same work. Arrays of shape (repeats,)."""
    return _ratio(difference_of_repeats(np.log(b_s), np.log(a_s)))


def difference_of_repeats(a: Array, b: Array) -> Interval:
    """Mean of B minus mean of A: Welch's t-interval. Arrays of shape (repeats,)."""
    variances = [float(v.var(ddof=1)) / len(v) for v in (a, b)]
    return _difference(float(b.mean() - a.mean()), variances, [len(a), len(b)])


def _difference(estimate: float, variances: Sequence[float], counts: Sequence[float]) -> Interval:
    """Of two means with these variances, and as many independent values behind each: Student's
    t-interval, with the degrees of freedom of Welch and Satterthwaite."""
    parts = sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    freedom = sum(variances) ** 2 / parts if parts else min(counts) - 1
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(variances))
    return estimate, estimate - half, estimate + half


def _ratio(of_logarithms: Interval) -> Interval:
    estimate, low, high = of_logarithms
    return math.exp(estimate), math.exp(low), math.exp(high)


# --- windows of steps -----------------------------------------------------------------------------


def ratio_of_windows(a: Array, b: Array) -> Interval | None:
    """Speed of B over that of A, from windows of the steps of one or two runs each; None: too few.
    Arrays of shape (2, windows): the steps of each, and the seconds of a sample over all devices.

    Neighbouring windows are slow together, so n of them count as fewer independent ones: as
    n (1 - rho) / (1 + rho), with their autocorrelation rho (Thiebaux and Zwiers 1984).
    """
    means, variances, counts = [], [], []
    for steps, sample_s in (a, b):
        seconds = steps * sample_s
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
    return _ratio(_difference(means[0] - means[1], variances, counts))


def autocorrelation(values: Array) -> float:
    """The lag-one autocorrelation of values in the order of time, with Kendall's correction of its
    bias, plus half its standard error: too small a value is the worse mistake."""
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
    """The 95 % interval of the second share of right answers minus the first: as of independent
    normal values, with one right and one wrong answer more of each (Agresti and Caffo 2000)."""
    counts = np.array([first_count, second_count]) + 2
    shares = (np.array([first, second]) * (counts - 2) + 1) / counts
    half = 1.96 * math.sqrt(float((shares * (1 - shares) / counts).sum()))
    difference = float(shares[1] - shares[0])
    return difference - half, difference + half
