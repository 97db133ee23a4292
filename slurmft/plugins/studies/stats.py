"""Confidence intervals of ratios and differences, from repeats or from the windows of two runs."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

LEAST_WINDOWS = 10
"""Windows of steps that a comparison needs: the corrections of `autocorrelation` are large, and
rough, for fewer."""

_LEAST_INDEPENDENT = 2.0
"""Independent windows that a comparison needs: fewer leave no degree of freedom for a variance."""

ALIKE = 1e-9
"""Differences below it are rounding."""


Interval = tuple[float, float, float]
"""An estimate, and the ends of its 95 % interval."""


class _Mean(NamedTuple):
    """A mean, and how well it is known."""

    value: float
    variance: float
    """Variance of the mean, not of the values behind it."""
    independent: float
    """Independent values behind it."""


# --- repeats --------------------------------------------------------------------------------------


def ratio_of_repeats(a_s: Array, b_s: Array) -> Interval:
    """Speed of B over that of A: Welch's t-interval of the logarithms of the seconds that each run
    took for the same work. Arrays of shape (repeats,)."""
    # Of logarithms, because runs differ by factors: the ends of the interval are then above 0, and
    # A over B has the inverse interval of B over A.
    log_a = np.log(a_s)
    log_b = np.log(b_s)
    # A's seconds over B's: who takes fewer is faster.
    return _ratio(difference_of_repeats(log_b, log_a))


def difference_of_repeats(a: Array, b: Array) -> Interval:
    """Mean of B minus mean of A: Welch's t-interval. Arrays of shape (repeats,)."""
    return _difference(_mean_of_repeats(a), _mean_of_repeats(b))


def _mean_of_repeats(values: Array) -> _Mean:
    count = len(values)
    # ddof=1: deviations from the mean of the same values are too small by one degree of freedom.
    variance = float(values.var(ddof=1))
    return _Mean(float(values.mean()), variance / count, count)


def _difference(first: _Mean, second: _Mean) -> Interval:
    """Second mean minus the first one: Student's t-interval, with the degrees of freedom of Welch
    and Satterthwaite, which do not take both variances for the same."""
    variance = first.variance + second.variance
    first_part = first.variance**2 / (first.independent - 1)
    second_part = second.variance**2 / (second.independent - 1)
    parts = first_part + second_part
    if parts:
        freedom = variance**2 / parts
    else:
        # Values that are all equal: the interval has no width, whatever the degrees of freedom.
        freedom = min(first.independent, second.independent) - 1
    # 2.5 % on either side leave 95 %.
    quantile = float(stdtrit(freedom, 0.975))
    half = quantile * math.sqrt(variance)
    estimate = second.value - first.value
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
    mean_a = _mean_of_windows(a)
    mean_b = _mean_of_windows(b)
    if mean_a is None or mean_b is None:
        return None
    # A's seconds over B's, as of repeats.
    return _ratio(_difference(mean_b, mean_a))


def _mean_of_windows(windows: Array) -> _Mean | None:
    """Returns the logarithm of the seconds of a sample; None: there are too few windows."""
    steps, sample_s = windows
    count = len(steps)
    if count < LEAST_WINDOWS:
        return None
    rho = autocorrelation(sample_s)
    independent = count * (1 - rho) / (1 + rho)
    if independent < _LEAST_INDEPENDENT:
        return None
    # Weighted by steps, because windows differ in length: steps without a rate count to the next.
    seconds = steps * sample_s
    mean_s = float(seconds.sum() / steps.sum())
    # Deviations of a ratio of two sums; relative, because a logarithm varies by relative changes.
    expected_s = mean_s * steps
    relative = (seconds - expected_s) / expected_s.mean()
    variance = float(relative.var(ddof=1))
    return _Mean(math.log(mean_s), variance / independent, independent)


def autocorrelation(values: Array) -> float:
    """The lag-one autocorrelation of values in the order of time, with Kendall's correction of its
    bias, plus half its standard error: too small a value is the worse mistake."""
    count = len(values)
    mean = values.mean()
    centred = values - mean
    squares = float((centred**2).sum())
    # Of values that are alike but for rounding, the rounding would be correlated.
    rounding = ALIKE * float(mean)
    if squares <= rounding**2 * count:
        return 0.0
    products = centred[1:] * centred[:-1]
    rho = float(products.sum()) / squares
    # A short series underestimates it, because its mean follows its own values.
    bias = (1 + 3 * rho) / count
    standard_error = math.sqrt((1 - rho**2) / count)
    rho += bias + 0.5 * standard_error
    # Below 0, windows would count as more than there are. The corrections may lead above 1, where
    # none would be independent: 0.9 leaves one of 19.
    return min(max(rho, 0.0), 0.9)


# --- shares of right answers ----------------------------------------------------------------------


def difference_of_shares(
    first: float,
    first_count: int,
    second: float,
    second_count: int,
) -> tuple[float, float]:
    """The 95 % interval of the second share of right answers minus the first: as of independent
    normal values, with one right and one wrong answer more of each (Agresti and Caffo 2000)."""
    shares = np.array([first, second])
    answers = np.array([first_count, second_count])
    # Without the added answers, a share of 1 would have no variance, however few its answers.
    counts = answers + 2
    adjusted = (shares * answers + 1) / counts
    variances = adjusted * (1 - adjusted) / counts
    # 1.96 standard deviations of a normal distribution hold 95 %.
    half = 1.96 * math.sqrt(float(variances.sum()))
    difference = float(adjusted[1] - adjusted[0])
    return difference - half, difference + half
