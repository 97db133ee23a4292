"""How long a run takes on another number of devices: a model of its phases, fitted to runs.

The model, for n devices on N nodes:

- A run is start-up, optimizer steps, evaluations, metrics with their broadcast, and the rest.
- A step computes for (samples a device x time a sample + micro-steps x fixed cost), stretched by
  the slowest of n devices, and waits for what of the all-reduce the overlap does not hide.
- The all-reduce of V bytes takes 2(n-1)/n V / bandwidth, as a ring does (Patarasuk and Yuan 2009),
  and 2 log2(n) latencies, as a tree does (Sanders, Speck and Traeff 2009): NCCL and oneCCL choose
  the better one. Over several nodes it is bounded by the slower link.
- DistributedDataParallel overlaps the all-reduce with the backward pass, bucket by bucket
  (Li et al. 2020); the last bucket never, the others for at most a share of the computation.
- A gather hands (n-1)/n of all predictions to a rank; metrics stored by every rank cost the main
  one a copy for each rank; a broadcast of a few numbers grows with the ranks.

Three measured runs do not determine all costs. So the fit is a least squares of logarithms in which
the default of every cost (`COSTS`) counts as one more measurement, as exact as its factor says.
Ranges are a parametric bootstrap: the fit is repeated with all measurements, defaults included,
moved by their errors (randomized maximum likelihood: Oliver, Reynolds and Liu 2008, chapter 10).
Where the measurements are silent, ranges are as wide as the defaults' factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array = NDArray[np.float64]

PHASES = ("startup", "train", "evaluate", "metric", "broadcast", "rest")
"""What the time of a run is made of."""

TRAIN_PARTS = ("computing", "starting", "waiting")
"""What training is made of: computing samples; the fixed cost of every micro-step; waiting for the
all-reduce and for the slowest device."""

TOTAL = "total"
"""The name of a time that is known as a whole only."""

MAX_DEVICES = 1024

BOOTSTRAP_FITS = 200
NOISE = 0.025
"""Share by which a run differs from the model at least: repeats on a busy cluster differ by 1 to 5
percent."""
DRIFT = 0.025
"""Error of the model for every doubling of devices beyond what was measured, as a share."""

LATENCY_S = 25e-6
"""Of one message: from 5 us (verbs, NVLink) to 100 us (TCP)."""
LAST_BUCKET = 0.25
"""Share of the gradients that is never hidden: the embedding's, a tenth to a half of a model."""
OVERLAP = 0.6
"""Share of computing that hides the other gradients: the backward pass is two thirds of a step."""
FABRIC_SHARE, FABRIC_FACTOR = 0.8, 1.25
"""Collectives reach two thirds to all of the line rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a run has to do, whatever it runs on."""

    train_samples: int
    """Of one epoch."""
    batch_size: int
    """Training samples of a device and micro-step."""
    epochs: int = 1
    micro_steps: int = 1
    evaluate_samples: int = 0
    """Of one evaluation; there is one after each epoch."""
    eval_batch_size: int = 256
    parameters: float = 66.4e6
    gradient_bytes: int = 4
    """Of one parameter in the all-reduce; 2 where gradients are compressed."""
    kept_global_batch: int | None = None
    """Global batch size where it stays, whatever the number of devices."""

    def steps(self, devices: int) -> int:
        """Optimizer steps of the run."""
        return self.epochs * math.ceil(self.train_samples / self.global_batch_size(devices))

    def global_batch_size(self, devices: int) -> int:
        """Samples of an optimizer step."""
        return self.kept_global_batch or self.batch_size * self.micro_steps * devices


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


class Cost(NamedTuple):
    """What a cost is before anything is measured."""

    default: float
    factor: float
    """The cost lies within default / factor and default x factor with a probability of 68 %."""


COSTS = {
    # Seconds a sample and seconds a micro-step: from small models on GPUs to large ones on CPUs;
    # a step starts 1,000 to 3,000 kernels of 5 to 10 us.
    "sample": Cost(5e-3, 20),
    "step": Cost(12e-3, 2.5),
    # Share a doubling: the expected maximum of n rises with log n where times have exponential
    # tails; padding, clocks and shared hosts vary by some percent.
    "slowdown": Cost(0.04, 2),
    # Bytes/s. From shared memory (4 GB/s) and PCIe 3 (12) to NVLink (40 and more); from 10 Gbit/s
    # Ethernet (1 GB/s) to HDR InfiniBand (25 GB/s).
    "local_bandwidth": Cost(12e9, 3),
    "network_bandwidth": Cost(3e9, 4),
    # Share of a training sample: the forward third, more in fp16.
    "forward": Cost(0.4, 1.5),
    # Seconds a sample: from copying 8 bytes (0.1 us) to a Python object on every rank (20 us).
    "gather": Cost(2e-6, 8),
    # Seconds a sample, and a sample and rank: scikit-learn 0.1 us, Python some us; copies cost
    # nothing if one rank stores, 3 us if all ranks do.
    "metric": Cost(0.5e-6, 5),
    "metric_copy": Cost(0.1e-6, 10),
    # Seconds: one small collective, some 50 us, and as much as a message's latency a rank.
    "broadcast": Cost(60e-6, 3),
    "broadcast_rank": Cost(15e-6, 3),
    # Share: what crosses nodes in gathers costs more than what stays, never less.
    "remote": Cost(0.3, 2.5),
    # Seconds: imports and data; a doubling, as meeting and trees of connections grow with log n;
    # saving the model, and what is between phases.
    "startup": Cost(2.0, 4),
    "startup_doubling": Cost(0.2, 4),
    "rest": Cost(0.5, 4),
}
"""One set for all data. Rows of more nodes than were measured must never change a number here."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The median, and what lies below and above with a probability of 5 % each."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Interval:
        low, median, high = (float(v) for v in np.quantile(draws, (0.05, 0.5, 0.95)))
        return cls(median, low, high)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run on a number of devices, as draws of the posterior; all arrays have shape (draws,)."""

    devices: int
    nodes: int
    work: Workload
    phases_s: Mapping[str, Array]
    """Phase -> seconds, of the phases that the measurements cover."""
    train_parts_s: Mapping[str, Array]
    """What the training's seconds are made of; nothing where training was not measured."""
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

    def phase_s(self, name: str) -> Interval:
        """The time of one phase, or the TOTAL, as it would be measured."""
        return self.total_s if name == TOTAL else Interval.of(self.phases_s[name] * self.noise)

    def share(self, seconds: Array) -> float:
        """The mean share of the run that some of its seconds are."""
        return float(np.mean(seconds / sum(self.phases_s.values())))


@dataclass(frozen=True, slots=True)
class Fit:
    """What the measured rows say of the costs, as draws of the bootstrap."""

    rows: tuple[Row, ...]
    costs: Mapping[str, Array]
    """Name -> draws, shape (draws, 1)."""
    covered: tuple[str, ...]
    """The phases that the rows were measured in; the others are left out of predictions."""
    log_noise: Array
    """Draws by which a run differs from the model, shape (draws,), the same for every prediction:
    ratios of two counts are not made uncertain by it twice."""
    log_drift: Array
    """The same, for every doubling of devices beyond what was measured."""

    def predict(
        self, devices: int, nodes: int, work: Workload | None = None, **changes: Any
    ) -> Prediction:
        """The time of a run.

        Args:
            devices: all of them.
            nodes: that they are on.
            work: what it does; what the first row did, if not given.
            changes: fields of the work that differ: epochs=3, batch_size=64.
        """
        work = replace(work or self.rows[0].work, **changes)
        found = phase_seconds(self.costs, _quantities([(work, devices, nodes)]))
        phases = {name: seconds[:, 0] for name, seconds in found.items()}
        counts = [row.devices for row in self.rows]
        beyond = abs(math.log2(devices / min(max(devices, min(counts)), max(counts))))
        return Prediction(
            devices,
            nodes,
            work,
            {name: phases[name] for name in self.covered},
            {name: phases[name] for name in TRAIN_PARTS if "train" in self.covered},
            np.exp(self.log_noise + beyond * self.log_drift),
        )


def fit(rows: Sequence[Row], network_gbit_s: float | None = None, seed: int = 0) -> Fit:
    """The costs behind measured rows.

    Args:
        rows: one run each; one is enough, but then the defaults decide how it scales.
        network_gbit_s: line rate between nodes, where it is known: rows of one node say nothing
            of it.
        seed: of the bootstrap; the same rows and seed give the same draws.

    Raises:
        ValueError: no row, or a time that is not above 0.
    """
    if not rows or any(not 0 < s < math.inf for row in rows for s in row.seconds.values()):
        raise ValueError("a fit needs rows, and times above 0")
    defaults = dict(COSTS)
    if network_gbit_s is not None:
        rate = network_gbit_s * 1e9 / 8 * FABRIC_SHARE
        defaults["network_bandwidth"] = Cost(rate, FABRIC_FACTOR)
    problem = _LeastSquares(rows, defaults)
    noise, positions = problem.bootstrap(np.random.default_rng(seed))
    measured = {name for row in rows for name in row.seconds}
    covered = tuple(p for p in PHASES if p in measured or TOTAL in measured)
    errors = np.random.default_rng([seed, 1]).standard_normal((2, len(positions)))
    return Fit(tuple(rows), problem.costs(positions), covered, noise * errors[0], DRIFT * errors[1])


# --- the model ------------------------------------------------------------------------------------


class _Quantities(NamedTuple):
    """What runs have to do; arrays of shape (runs,)."""

    devices: Array
    nodes: Array
    steps: Array
    micro_steps: Array
    samples: Array
    """Training samples of the run, of all devices."""
    evaluations: Array
    """0 where nothing is evaluated."""
    evaluate_samples: Array
    gradient_bytes: Array


def _quantities(runs: Sequence[tuple[Workload, int, int]]) -> _Quantities:
    """Of work, devices and nodes."""
    found = [
        (
            devices,
            nodes,
            work.steps(devices),
            work.micro_steps,
            work.train_samples * work.epochs,
            work.epochs if work.evaluate_samples else 0,
            work.evaluate_samples,
            work.parameters * work.gradient_bytes,
        )
        for work, devices, nodes in runs
    ]
    return _Quantities(*np.array(found, dtype=np.float64).T)


def phase_seconds(costs: Mapping[str, Array], of: _Quantities) -> dict[str, Array]:
    """Phase -> seconds, shape (draws, runs); and the same of TOTAL, and of what training is.

    Args:
        costs: name -> draws, shape (draws, 1).
        of: the runs.
    """
    doublings = np.log2(of.devices)
    # What a rank gets from others, and how much dearer it is where they are on other nodes.
    foreign = (of.devices - 1) / of.devices
    dearer = 1 + costs["remote"] * (of.nodes > 1)
    computing = of.samples / of.devices * costs["sample"]
    starting = of.steps * of.micro_steps * costs["step"]
    busy = computing + starting
    waiting = busy * costs["slowdown"] * doublings
    waiting = waiting + of.steps * exposed_seconds(costs, of, busy / of.steps)
    evaluating = of.evaluate_samples / of.devices * costs["sample"] * costs["forward"]
    gathering = of.evaluate_samples * foreign * costs["gather"] * dearer
    metric = costs["metric"] + costs["metric_copy"] * of.devices * dearer
    broadcast = costs["broadcast"] + costs["broadcast_rank"] * (of.devices - 1) * dearer
    found = {
        "startup": costs["startup"] + costs["startup_doubling"] * doublings,
        "train": busy + waiting,
        "evaluate": of.evaluations * (evaluating + gathering),
        "metric": of.evaluations * of.evaluate_samples * metric,
        "broadcast": of.evaluations * broadcast,
        "rest": costs["rest"] + 0 * doublings,
    }
    found[TOTAL] = sum(found.values(), np.zeros(1))
    return found | {"computing": computing, "starting": starting, "waiting": waiting}


def exposed_seconds(costs: Mapping[str, Array], of: _Quantities, computing_s: Array) -> Array:
    """What a step waits for its all-reduce, shape (draws, runs).

    Args:
        costs: name -> draws, shape (draws, 1).
        of: the runs.
        computing_s: of one step, shape (draws, runs).
    """
    reduce_s = all_reduce_seconds(costs, of)
    hidden = OVERLAP * computing_s / of.micro_steps
    return np.maximum(reduce_s - hidden, LAST_BUCKET * reduce_s)


def all_reduce_seconds(costs: Mapping[str, Array], of: _Quantities) -> Array:
    """One all-reduce of all gradients, shape (draws, runs); 0 on one device."""
    slower = np.minimum(costs["local_bandwidth"], costs["network_bandwidth"])
    bandwidth = np.where(of.nodes == 1, costs["local_bandwidth"], slower)
    transfer = 2 * (of.devices - 1) / of.devices * of.gradient_bytes / bandwidth
    seconds: Array = transfer + 2 * np.log2(of.devices) * LATENCY_S
    return seconds


# --- the fit --------------------------------------------------------------------------------------


class _LeastSquares:
    """Measured against modelled times, and costs against their defaults, all as logarithms.

    A position is a cost's distance from its default, in units of the logarithm of its factor.
    """

    def __init__(self, rows: Sequence[Row], defaults: Mapping[str, Cost]) -> None:
        # Repeats are one run, which the model times once.
        every = [(row.work, row.devices, row.nodes) for row in rows]
        runs = list(dict.fromkeys(every))
        self._runs = _quantities(runs)
        self._names = tuple(defaults)
        self._defaults, self._factors = np.log(list(defaults.values())).T
        found = [
            (name, runs.index(run), s, row.resolution_s.get(name, 0.0) / s)
            for run, row in zip(every, rows, strict=True)
            for name, s in row.seconds.items()
        ]
        self._times = [(name, run) for name, run, *_ in found]
        self._logs = np.log([s for *_, s, _ in found])
        self._resolution = np.array([share for *_, share in found])
        self._errors = np.hypot(NOISE, self._resolution)

    def costs(self, positions: Array) -> dict[str, Array]:
        """Name -> costs of shape (draws, 1), of positions of shape (draws, costs)."""
        values = np.exp(self._defaults + positions * self._factors)
        return {name: values[:, i : i + 1] for i, name in enumerate(self._names)}

    def bootstrap(self, generator: np.random.Generator) -> tuple[float, Array]:
        """The share by which runs differ from the model, and positions, (draws, costs).

        Every other draw has the opposite errors, so that few make a good median.
        """
        zeros = np.zeros(len(self._names))
        best = self._solve(self._logs, zeros, zeros)
        distances = (self._logs - self._log_seconds(best[None])[0]) / self._errors
        noise = NOISE * max(1.0, float(np.sqrt(np.mean(distances**2))))
        self._errors = np.hypot(noise, self._resolution)
        size = BOOTSTRAP_FITS // 2, len(self._logs) + len(self._names)
        moved = generator.standard_normal(size)
        moved = np.concatenate([moved, -moved])
        logs, defaults = np.split(moved, [len(self._logs)], axis=1)
        logs = self._logs + self._errors * logs
        solved = [self._solve(*each, best) for each in zip(logs, defaults, strict=True)]
        return noise, np.array(solved)

    def _solve(self, logs: Array, defaults: Array, start: Array) -> Array:
        """The position of the least squares, for measured logarithms and defaults' positions."""

        def residuals(position: Array) -> Array:
            distances = self._log_seconds(position[None])[0] - logs
            return np.concatenate([distances / self._errors, position - defaults])

        def jacobian(position: Array) -> Array:
            moved = self._log_seconds(np.vstack([position, position + 1e-4 * identity]))
            slopes = (moved[1:] - moved[0]).T / 1e-4
            return np.vstack([slopes / self._errors[:, None], identity])

        identity = np.eye(len(self._names))
        found = least_squares(residuals, start, jacobian, method="lm", xtol=1e-4, ftol=1e-4)
        position: Array = found.x
        return position

    def _log_seconds(self, positions: Array) -> Array:
        """Of every measured time, shape (draws, times)."""
        seconds = phase_seconds(self.costs(positions), self._runs)
        expected = np.stack([seconds[name][:, run] for name, run in self._times], axis=1)
        return np.log(np.maximum(expected, 1e-300))
