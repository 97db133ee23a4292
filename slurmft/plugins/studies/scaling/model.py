"""A model of a run's time on other numbers of devices, fitted to measured runs.

Every phase of a run is a sum of a few terms, each a cost times a quantity that follows from the
work, the devices and the nodes (`TERMS`). For example, training takes

    cost of a sample x samples of a device
    + cost of a step x steps
    + cost of waiting x steps x log2(devices)      gradients, and the slowest of all devices
    + cost of the network x steps x log2(devices)  only where the devices are on several nodes

Costs are fitted phase by phase, by non-negative least squares of relative errors. Two or three runs
do not determine all of them, so every cost but the first of its phase has a default with an error,
which counts as one more measurement. What no run shows, such as the network of runs on one node, is
therefore as uncertain as its default, and `Fit.unknowns` names it.

Predictions are draws from the normal distribution of the fitted costs, so that their intervals, and
those of ratios between two predictions, follow from the same draws.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PHASES = ("startup", "train", "evaluate", "metric", "broadcast", "rest")
"""What the time of a run is made of."""

TRAIN_PARTS = ("computing", "starting", "waiting")
"""What training is made of: computing samples; the fixed cost of every micro-step; waiting for the
all-reduce and for the slowest device."""

TOTAL = "total"
"""The name of a time that is known as a whole only, as in published tables."""

MAX_DEVICES = 1024

DRAWS = 400

_NOISE = 0.03
"""Smallest relative difference between a run and the model: repeats on a busy cluster differ by
1 to 5 percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of a run, whatever it runs on."""

    train_samples: int
    """Samples of one epoch."""
    batch_size: int
    """Training samples of a device and micro-step."""
    epochs: int = 1
    micro_steps: int = 1
    evaluate_samples: int = 0
    """Samples of one evaluation."""
    evaluations_per_epoch: float = 1.0
    tokens_per_sample: float | None = None
    kept_global_batch: int | None = None
    """Global batch size where it stays, whatever the number of devices."""
    accumulates: bool = False
    """True if it is made up of as many micro-steps of `batch_size` as the devices need, rather than
    of `micro_steps` smaller ones."""

    @property
    def evaluations(self) -> float:
        return self.epochs * self.evaluations_per_epoch

    def steps(self, devices: int) -> int:
        """Returns the optimizer steps of the run."""
        # The last batch of an epoch may be smaller: it is a step as well.
        step_samples = self.global_batch_size(devices)
        steps_per_epoch = math.ceil(self.train_samples / step_samples)
        return self.epochs * steps_per_epoch

    def micro_steps_of_step(self, devices: int) -> int:
        """Returns the micro-steps of an optimizer step."""
        if not self.accumulates:
            return self.micro_steps
        # Rounded up, as in the training.
        step_samples = self.global_batch_size(devices)
        return math.ceil(step_samples / (self.batch_size * devices))

    def global_batch_size(self, devices: int) -> int:
        """Returns the samples of an optimizer step."""
        if self.kept_global_batch:
            return self.kept_global_batch
        return self.batch_size * self.micro_steps * devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured run."""

    label: str
    work: Workload
    devices: int
    nodes: int
    seconds: Mapping[str, float]
    """Phase, or TOTAL -> seconds."""
    resolution_s: Mapping[str, float] = field(default_factory=dict)
    """Phase, or TOTAL -> how finely it was measured (one standard deviation), in seconds."""


# --- the terms ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    """The quantities that the terms are made of."""

    work: Workload
    devices: int
    nodes: int
    reference_samples: int
    """Samples of a device and optimizer step in the first measured run: the costs of waiting are
    relative to what those take to compute."""

    @property
    def samples(self) -> float:
        """Training samples of a device."""
        return self.work.train_samples * self.work.epochs / self.devices

    @property
    def micro_steps(self) -> float:
        micro_steps = self.work.micro_steps_of_step(self.devices)
        return self.work.steps(self.devices) * micro_steps

    @property
    def waits(self) -> float:
        """Doublings of the devices in all steps, in samples of the first run's steps."""
        steps = self.work.steps(self.devices)
        doublings = math.log2(self.devices)
        return steps * self.reference_samples * doublings

    @property
    def evaluated(self) -> float:
        """Samples of all evaluations, on all devices."""
        return self.work.evaluate_samples * self.work.evaluations

    @property
    def gathered(self) -> float:
        """Evaluated samples that a device gets from the others."""
        return self.evaluated * (self.devices - 1) / self.devices

    @property
    def is_far(self) -> bool:
        """The devices are on several nodes; as a factor of a quantity, 0 or 1."""
        return self.nodes > 1


class Term(NamedTuple):
    """One term of a phase: a cost in seconds, times a quantity."""

    cost: str
    part: str
    """The part of the time that it is shown as."""
    quantity: Callable[[_Setting], float]
    default: float = 0.0
    error: float = 0.0
    """One standard deviation of the default; 0: the runs determine the cost."""
    share_of: str = ""
    """The cost that default and error are shares of; empty: they are seconds."""


# Where the times of devices have exponential tails, the slowest of n rises with log n. An
# all-reduce as a tree takes 2 log2(n) messages (Sanders, Speck and Traeff 2009); as a ring, it
# grows less, and the backward pass hides most of it (Li et al. 2020).
_TRAINING = (
    Term("sample", "computing", lambda s: s.samples),
    # A step starts 1,000 to 3,000 kernels of 5 to 10 us each.
    Term(
        "step",
        "starting",
        lambda s: s.micro_steps,
        default=12e-3,
        error=12e-3,
    ),
    Term(
        "wait",
        "waiting",
        lambda s: s.waits,
        default=0.05,
        error=0.05,
        share_of="sample",
    ),
    Term(
        "network",
        "waiting",
        lambda s: s.waits * s.is_far,
        default=0.02,
        error=0.04,
        share_of="sample",
    ),
)

TERMS: dict[str, tuple[Term, ...]] = {
    "startup": (
        Term("startup", "startup", lambda s: 1),
        Term(
            "rendezvous",
            "startup",
            lambda s: math.log2(s.devices),
            default=0.1,
            error=0.1,
            share_of="startup",
        ),
    ),
    "train": _TRAINING,
    "evaluate": (
        Term("forward", "evaluation", lambda s: s.evaluated / s.devices),
        Term(
            "gather",
            "evaluation",
            lambda s: s.gathered,
            default=0.04,
            error=0.04,
            share_of="forward",
        ),
        Term(
            "far_gather",
            "evaluation",
            lambda s: s.gathered * s.is_far,
            default=0.3,
            error=0.3,
            share_of="gather",
        ),
    ),
    # One process computes a metric. If all ranks store all predictions, it grows with the ranks.
    "metric": (
        Term("metric", "metric", lambda s: s.evaluated),
        Term(
            "copy",
            "metric",
            lambda s: s.evaluated * s.devices,
            default=0.5,
            error=2.0,
            share_of="metric",
        ),
        Term(
            "far_copy",
            "metric",
            lambda s: s.evaluated * s.devices * s.is_far,
            default=0.3,
            error=0.3,
            share_of="copy",
        ),
    ),
    "broadcast": (
        Term("call", "metric", lambda s: s.work.evaluations),
        Term(
            "message",
            "metric",
            lambda s: s.work.evaluations * s.devices,
            default=0.5,
            error=2.0,
            share_of="call",
        ),
        Term(
            "far_message",
            "metric",
            lambda s: s.work.evaluations * s.devices * s.is_far,
            default=0.3,
            error=0.3,
            share_of="message",
        ),
    ),
    "rest": (Term("rest", "rest", lambda s: 1),),
    # Such a time has no phases: how much of it is start-up, the default alone says.
    TOTAL: (
        *_TRAINING,
        Term("startup", "startup", lambda s: 1, default=2.0, error=4.0),
    ),
}
"""Phase -> its terms. One set of defaults for all data: rows of more nodes than were measured must
never change a number here."""


# --- the fit --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and what lies below and above with a probability of 5 % each."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Self:
        """Returns the interval of draws, shape (DRAWS,)."""
        low, median, high = np.quantile(draws, (0.05, 0.5, 0.95))
        # float(): JSON does not know NumPy's numbers.
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run on a number of devices; all arrays are draws, of shape (DRAWS,)."""

    phases_s: Mapping[str, Array]
    """Phase -> seconds, for the phases that the measurements cover."""
    parts_s: Mapping[str, float]
    """Part of the time -> seconds, the mean of the draws."""
    noise: Array
    """Factor by which a run differs from the model."""

    @property
    def draws_s(self) -> Array:
        """The time of the run, as it would be measured."""
        total: Array = sum(self.phases_s.values()) * self.noise
        return total

    @property
    def total_s(self) -> Interval:
        return Interval.of(self.draws_s)


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs that were fitted to measured rows, as draws."""

    rows: tuple[Row, ...]
    costs: Mapping[str, Array]
    """Phase that was measured -> costs of its terms in seconds, shape (DRAWS, terms)."""
    noise: Array
    """Factor by which a run differs from the model, shape (DRAWS,). All predictions share it, so
    that the ratio of two is not made uncertain by it twice."""

    def predict(
        self,
        devices: int,
        nodes: int,
        work: Workload | None = None,
    ) -> Prediction:
        """Predicts a run on this many devices and nodes.

        Args:
            work: what it has to do; default: what the first row had to do.
        """
        work = work or self.rows[0].work
        setting = _Setting(work, devices, nodes, _reference_samples(self.rows))
        phases_s: dict[str, Array] = {}
        parts_s: dict[str, float] = {}
        for phase, costs in self.costs.items():
            terms_s = costs * _quantities(phase, setting)
            # Single draws of uncertain costs are negative; no phase is shorter than its first term.
            shortest_s = np.maximum(0, terms_s[:, 0])
            phases_s[phase] = np.maximum(terms_s.sum(axis=1), shortest_s)
            means_s = terms_s.mean(axis=0)
            for term, seconds in zip(TERMS[phase], means_s, strict=True):
                # Several terms are of one part.
                seconds_before = parts_s.get(term.part, 0.0)
                parts_s[term.part] = seconds_before + float(seconds)
        return Prediction(phases_s, parts_s, self.noise)

    def unknowns(self, work: Workload, nodes: int) -> list[str]:
        """Lists what a prediction of this work on so many nodes needs, and no run shows."""
        unknowns = []
        if nodes > 1 and all(row.nodes == 1 for row in self.rows):
            unknowns.append(
                "the network between nodes: no run had more than one. The ranges assume a fast "
                "one; a run on two nodes would show it"
            )
        batches = {row.work.batch_size for row in self.rows}
        if len(batches) == 1 and work.batch_size not in batches:
            unknowns.append(
                f"the fixed cost of a step: all runs had a batch size of {batches.pop()}. A run "
                "with another --batch-size would show it"
            )
        device_counts = {row.devices for row in self.rows}
        if len(device_counts) == 1:
            unknowns.append("how the time depends on the devices: all runs had as many")
        return unknowns


def fit(rows: Sequence[Row], seed: int = 0) -> Fit:
    """Fits the costs to measured rows.

    Args:
        rows: one run each; of one, the defaults decide how it scales.
        seed: of the draws; the same rows and seed give the same draws.

    Raises:
        ValueError: there is no row, or a time is not above 0.
    """
    times_s: list[float] = []
    for row in rows:
        times_s += row.seconds.values()
    # As a chain, so that NaN is refused as well.
    if not rows or not all(0 < seconds < math.inf for seconds in times_s):
        raise ValueError("a fit needs rows, and times above 0")
    solutions: dict[str, _Solution] = {}
    for phase in TERMS:
        solution = _fit_phase(phase, rows)
        if solution is not None:
            solutions[phase] = solution
    misfits = np.concatenate([solution.misfits for solution in solutions.values()])
    # Where rows lie farther from the model than their errors allow, all errors are larger.
    root_mean_square = float(np.sqrt(np.mean(misfits**2)))
    scale = max(1.0, root_mean_square)
    generator = np.random.default_rng(seed)
    costs: dict[str, Array] = {}
    for phase, solution in solutions.items():
        costs[phase] = solution.draw(generator, scale)
    # Its logarithm is normal: a factor is never below 0.
    draws = _standard_normal(generator, 1)[:, 0]
    noise = np.exp(_NOISE * scale * draws)
    return Fit(tuple(rows), costs, noise)


@dataclass(frozen=True, slots=True)
class _Solution:
    """The fitted costs of a phase."""

    costs: Array
    """Shape (terms,)."""
    covariance: Array
    """Shape (terms, terms)."""
    misfits: Array
    """Differences between rows and model, in units of their errors; shape (rows,)."""

    def draw(self, generator: np.random.Generator, scale: float) -> Array:
        """Draws costs, shape (DRAWS, terms).

        Args:
            scale: factor of their errors.
        """
        # Independent normal draws times a root of the covariance have that covariance.
        root = np.linalg.cholesky(self.covariance)
        errors: Array = _standard_normal(generator, len(self.costs)) @ root.T
        return self.costs + scale * errors


def _fit_phase(phase: str, rows: Sequence[Row]) -> _Solution | None:
    """Fits the costs of a phase; None: no row has a time of it, or anything to do in it."""
    reference = _reference_samples(rows)
    settings = [_Setting(row.work, row.devices, row.nodes, reference) for row in rows]
    quantities = np.array([_quantities(phase, setting) for setting in settings])
    used = []
    for index, row in enumerate(rows):
        # Without a quantity, such as evaluations of no samples, a row says nothing of the costs.
        has_work = quantities[index].any()
        if phase in row.seconds and has_work:
            used.append(index)
    if not used:
        return None
    quantities = quantities[used]
    used_rows = [rows[i] for i in used]
    seconds = np.array([row.seconds[phase] for row in used_rows])
    resolution_s = np.array([row.resolution_s.get(phase, 0.0) for row in used_rows])
    # Two independent errors. Least squares takes every equation in units of its own error.
    errors_s = np.hypot(_NOISE * seconds, resolution_s)
    measured = quantities / errors_s[:, None]
    targets = seconds / errors_s
    # The cost of the first term if the others cost nothing.
    largest = np.median(seconds / quantities[:, 0])
    costs = np.full(len(TERMS[phase]), largest)
    # Defaults are shares of other costs, which the fit itself finds: so it is repeated until those
    # settle. The first cost counts here as if it were the whole time: shares of it stay shares of
    # something where it is fitted as 0.
    for _ in range(3):
        costs[0] = largest
        positive_costs = np.maximum(costs, 1e-3 * largest)
        defaults, default_targets = _defaults(phase, positive_costs)
        equations = np.vstack([measured, defaults])
        all_targets = np.concatenate([targets, default_targets])
        costs = _non_negative(equations, all_targets)
    # That of least squares whose equations have errors of 1, as these have in their units.
    covariance = np.linalg.inv(equations.T @ equations)
    # Of measured rows only: that costs differ from their defaults is what defaults are for.
    misfits = measured @ costs - targets
    return _Solution(costs, covariance, misfits)


def _reference_samples(rows: Sequence[Row]) -> int:
    """Returns the samples of a device and optimizer step in the first row."""
    first = rows[0].work
    return first.batch_size * first.micro_steps


def _quantities(phase: str, setting: _Setting) -> Array:
    """Returns the quantities of the terms of a phase, shape (terms,)."""
    quantities = [term.quantity(setting) for term in TERMS[phase]]
    return np.array(quantities, dtype=np.float64)


def _defaults(phase: str, costs: Array) -> tuple[Array, Array]:
    """Returns the defaults of a phase as equations, in units of their errors.

    Args:
        costs: as they are known so far; defaults may be shares of them. Shape (terms,), above 0.

    Returns:
        Coefficients, shape (defaults, terms), and targets, shape (defaults,).
    """
    terms = TERMS[phase]
    index = {term.cost: i for i, term in enumerate(terms)}
    equations: list[Array] = []
    targets: list[float] = []
    for term in terms:
        if not term.error:
            continue
        # Default and error are seconds, or else shares of another cost.
        unit_s = costs[index[term.share_of]] if term.share_of else 1.0
        equation = np.zeros(len(terms))
        equation[index[term.cost]] = 1 / (term.error * unit_s)
        equations.append(equation)
        targets.append(term.default / term.error)
    # A phase without defaults has no equation, which would be an array of one dimension.
    coefficients = np.array(equations).reshape(-1, len(terms))
    return coefficients, np.array(targets)


def _non_negative(equations: Array, targets: Array) -> Array:
    """Solves least squares for costs of 0 or more: negative ones are set to 0, one after another.

    Args:
        equations: shape (equations, terms).
        targets: shape (equations,).
    """
    term_count = equations.shape[1]
    free = list(range(term_count))
    while True:
        costs = np.zeros(term_count)
        solution, *_ = np.linalg.lstsq(equations[:, free], targets, rcond=None)
        costs[free] = solution
        lowest = min(free, key=lambda i: float(costs[i]))
        if costs[lowest] >= 0 or len(free) == 1:
            return costs
        free.remove(lowest)


def _standard_normal(generator: np.random.Generator, count: int) -> Array:
    """Returns normal draws, shape (DRAWS, count); opposite ones in pairs, for a steadier median."""
    half = generator.standard_normal((DRAWS // 2, count))
    return np.concatenate([half, -half])
