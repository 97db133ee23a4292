"""How long a run takes on another number of devices: a model of its phases, fitted to runs.

Three measured runs do not determine what a dozen physical costs are. So every cost has a prior
that says what it can be on any cluster (`PRIORS`), the measurements narrow that, and predictions
are distributions: where the measurements are silent, they are as wide as the prior.

The model, for n devices on N nodes:

- A run is start-up, optimizer steps, evaluations, metrics with their broadcast, and the rest.
- A step computes for (samples a device x time a sample + micro-steps x fixed cost), stretched by
  the slowest of n devices, and waits for what of the all-reduce the overlap does not hide.
- The all-reduce of V bytes is the faster of a ring, 2(n-1) latencies + 2(n-1)/n V / bandwidth
  (Patarasuk and Yuan 2009), and a double binary tree, 2 log2(n) latencies + 2 V / bandwidth
  (Sanders, Speck and Traeff 2009), as NCCL and oneCCL choose. Over several nodes both are bounded
  by the slower link.
- DistributedDataParallel overlaps the all-reduce with the backward pass, bucket by bucket
  (Li et al. 2020); the last bucket never, the others for at most a share of the computation.
- A gather hands (n-1)/n of all predictions to a rank; metrics stored by every rank cost the main
  one a copy for each rank; a broadcast of a few numbers grows with the ranks.

Sampling is by sequential Monte Carlo (Del Moral, Doucet and Jasra 2006): particles from the prior,
led to the posterior in small steps of temperature. It needs no start, no gradient and no tuning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PHASES = ("startup", "train", "evaluate", "metric", "broadcast", "rest")
"""What the time of a run is made of."""

TRAIN_PARTS = ("computing", "starting", "waiting")
"""What training is made of: computing samples; the fixed cost of every micro-step; waiting for the
all-reduce and for the slowest device."""

TOTAL = "total"
"""The name of a time that is known as a whole only."""

MAX_DEVICES = 1024

PARTICLES = 2000
_MOVES = 12
_EFFECTIVE_SHARE = 0.5


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


@dataclass(frozen=True, slots=True)
class Prior:
    """What a cost can be before anything is measured: log-normal, so never below zero."""

    median: float
    factor: float
    """The cost lies within median / factor and median x factor with a probability of 68 %."""
    unit: str
    why: str


PRIORS: dict[str, Prior] = {
    "sample": Prior(
        5e-3, 20, "s", "a sample trains in 0.5 ms (small model, GPU) to 1 s (large model, CPU)"
    ),
    "step": Prior(
        12e-3, 2.5, "s",
        "a step starts 1,000 to 3,000 kernels of 5 to 10 us (forward, backward, optimizer)",
    ),
    "slowdown": Prior(
        0.04, 2, "share a doubling",
        "a step waits for the slowest device: the expected maximum of n rises with log n where "
        "times have exponential tails; padding, clocks and shared hosts vary by some percent",
    ),
    "local_latency": Prior(15e-6, 3, "s", "a message within a node: 5 us (NVLink) to 50 us"),
    "local_bandwidth": Prior(
        12e9, 3, "bytes/s", "from shared memory (4 GB/s) and PCIe 3 (12) to NVLink (40 and more)"
    ),
    "network_latency": Prior(25e-6, 3, "s", "a message between nodes: 5 us (verbs) to 100 (TCP)"),
    "network_bandwidth": Prior(
        3e9, 4, "bytes/s", "from 10 Gbit/s Ethernet (1 GB/s) to HDR InfiniBand (25 GB/s)"
    ),
    "last_bucket": Prior(
        0.25, 2, "share",
        "gradients of the embedding come last and are never hidden: a tenth to a half of a model",
    ),
    "overlap": Prior(
        0.6, 1.3, "share of computing", "the backward pass is two thirds of a step"
    ),
    "forward": Prior(
        0.4, 1.5, "share of sample", "evaluating is the forward third of training, more in fp16"
    ),
    "evaluate_step": Prior(4e-3, 3, "s", "a third of the kernels of a training step"),
    "evaluate_slowdown": Prior(
        0.01, 2.5, "share a doubling", "as slowdown, but averaged over batches that wait for nobody"
    ),
    "gather": Prior(
        2e-6, 8, "s a sample",
        "from copying 8 bytes (0.1 us) to a Python object on every rank (20 us)",
    ),
    "metric_call": Prior(2e-3, 5, "s", "one call of a metric, whatever its size"),
    "metric_sample": Prior(0.5e-6, 5, "s a sample", "scikit-learn: 0.1 us; Python: some us"),
    "metric_copy": Prior(
        0.1e-6, 10, "s a sample and rank", "nothing if one rank stores, 3 us if all ranks do"
    ),
    "broadcast_call": Prior(60e-6, 3, "s", "one small collective: some 50 us"),
    "broadcast_rank": Prior(15e-6, 3, "s a rank", "as local latency, once a rank"),
    "remote": Prior(
        0.3, 2.5, "share", "what crosses nodes in gathers costs more than what stays, never less"
    ),
    "startup": Prior(2.0, 4, "s", "from a loop's first step (0.5 s) to imports and data (30 s)"),
    "startup_doubling": Prior(0.2, 4, "s a doubling", "meeting and trees of connections: log n"),
    "rest": Prior(0.5, 4, "s", "saving the model, between phases"),
    "noise": Prior(0.025, 1.6, "share", "repeats of a run on a busy cluster differ by 1 to 5 %"),
}  # fmt: skip
"""One set for all data. Rows of more nodes than were measured must never change a number here."""

FABRIC_SHARE = Prior(0.8, 1.25, "share", "collectives reach two thirds to all of the line rate")

_NAMES = tuple(PRIORS)


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
    """What the measured rows say of the costs, as draws of the posterior."""

    rows: tuple[Row, ...]
    costs: Mapping[str, Array]
    """Name of a prior -> draws, shape (draws,)."""
    covered: tuple[str, ...]
    """The phases that the rows were measured in; the others are left out of predictions."""
    noise: Array
    """Draws of the noise's factor, shape (draws,), the same for every prediction: ratios of two
    counts are not made uncertain by it twice."""

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
        point = _Points.of([(work, devices, nodes)])
        costs = {name: draws[:, None] for name, draws in self.costs.items()}
        phases = {k: v[:, 0] for k, v in phase_seconds(costs, point).items()}
        return Prediction(
            devices,
            nodes,
            work,
            {name: phases[name] for name in self.covered},
            {name: phases[name] for name in TRAIN_PARTS if "train" in self.covered},
            self.noise,
        )


def fit(rows: Sequence[Row], network_gbit_s: float | None = None, seed: int = 0) -> Fit:
    """The costs behind measured rows.

    Args:
        rows: one run each; one is enough, but then the priors decide how it scales.
        network_gbit_s: line rate between nodes, where it is known: rows of one node say nothing
            of it.
        seed: of the sampler; the same rows and seed give the same draws.

    Raises:
        ValueError: no row, or a time that is not above 0.
    """
    if not rows or any(not 0 < s < math.inf for row in rows for s in row.seconds.values()):
        raise ValueError("a fit needs rows, and times above 0")
    generator = np.random.default_rng(seed)
    priors = dict(PRIORS)
    if network_gbit_s is not None:
        rate = network_gbit_s * 1e9 / 8 * FABRIC_SHARE.median
        priors["network_bandwidth"] = replace(
            PRIORS["network_bandwidth"], median=rate, factor=FABRIC_SHARE.factor
        )
    target = _Target(rows, priors)
    positions = sample(target.log_likelihood, len(priors), generator)
    costs = {name: draws[:, 0] for name, draws in target.costs(positions).items()}
    noise = np.exp(costs["noise"] * generator.standard_normal(len(positions)))
    measured = {name for row in rows for name in row.seconds}
    covered = tuple(p for p in PHASES if p in measured or TOTAL in measured)
    return Fit(tuple(rows), costs, covered, noise)


# --- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Points:
    """Runs to be timed; arrays of shape (runs,)."""

    devices: Array
    nodes: Array
    steps: Array
    samples: Array
    """Training samples of the run, of all devices."""
    micro_steps: Array
    evaluations: Array
    """0 where nothing is evaluated."""
    evaluate_samples: Array
    evaluate_steps: Array
    """Batches of a device in one evaluation."""
    gradient_bytes: Array

    @classmethod
    def of(cls, runs: Sequence[tuple[Workload, int, int]]) -> _Points:
        def column(values: list[float]) -> Array:
            return np.array(values, dtype=np.float64)

        return cls(
            devices=column([n for _, n, _ in runs]),
            nodes=column([nodes for _, _, nodes in runs]),
            steps=column([w.steps(n) for w, n, _ in runs]),
            samples=column([w.train_samples * w.epochs for w, _, _ in runs]),
            micro_steps=column([w.micro_steps for w, _, _ in runs]),
            evaluations=column([w.epochs if w.evaluate_samples else 0 for w, _, _ in runs]),
            evaluate_samples=column([w.evaluate_samples for w, _, _ in runs]),
            evaluate_steps=column(
                [math.ceil(w.evaluate_samples / (n * w.eval_batch_size)) for w, n, _ in runs]
            ),
            gradient_bytes=column([w.parameters * w.gradient_bytes for w, _, _ in runs]),
        )


def phase_seconds(costs: Mapping[str, Array], at: _Points) -> dict[str, Array]:
    """Phase -> seconds, shape (draws, runs); and the same of what training is made of.

    Args:
        costs: name of a prior -> draws, shape (draws, 1).
        at: the runs.
    """
    doublings = np.log2(at.devices)
    # What a rank gets from others, and how much dearer it is where they are on other nodes.
    foreign = (at.devices - 1) / at.devices
    dearer = 1 + costs["remote"] * (at.nodes > 1)
    computing = at.samples / at.devices * costs["sample"]
    starting = at.steps * at.micro_steps * costs["step"]
    busy = computing + starting
    waiting = busy * costs["slowdown"] * doublings
    waiting = waiting + at.steps * exposed_seconds(costs, at, busy / at.steps)
    evaluating = at.evaluate_samples / at.devices * costs["sample"] * costs["forward"]
    evaluating = evaluating + at.evaluate_steps * costs["evaluate_step"]
    evaluating = evaluating * (1 + costs["evaluate_slowdown"] * doublings)
    gathering = at.evaluate_samples * foreign * costs["gather"] * dearer
    metric = costs["metric_call"] + at.evaluate_samples * (
        costs["metric_sample"] + costs["metric_copy"] * at.devices * dearer
    )
    broadcast = costs["broadcast_call"] + costs["broadcast_rank"] * (at.devices - 1) * dearer
    return {
        "startup": costs["startup"] + costs["startup_doubling"] * doublings,
        "train": busy + waiting,
        "evaluate": at.evaluations * (evaluating + gathering),
        "metric": at.evaluations * metric,
        "broadcast": at.evaluations * broadcast,
        "rest": costs["rest"] + 0 * doublings,
        "computing": computing,
        "starting": starting,
        "waiting": waiting,
    }


def exposed_seconds(costs: Mapping[str, Array], at: _Points, computing_s: Array) -> Array:
    """What a step waits for its all-reduce, shape (draws, runs).

    Args:
        costs: name of a prior -> draws, shape (draws, 1).
        at: the runs.
        computing_s: of one step, shape (draws, runs).
    """
    reduce_s = all_reduce_seconds(costs, at)
    last = np.minimum(costs["last_bucket"], 1.0) * reduce_s
    hidden = np.minimum(costs["overlap"], 1.0) * computing_s / at.micro_steps
    return last + np.maximum(reduce_s - last - hidden, 0.0)


def all_reduce_seconds(costs: Mapping[str, Array], at: _Points) -> Array:
    """One all-reduce of all gradients, shape (draws, runs); 0 on one device."""
    inside = at.nodes == 1
    slower = np.minimum(costs["local_bandwidth"], costs["network_bandwidth"])
    bandwidth = np.where(inside, costs["local_bandwidth"], slower)
    longer = np.maximum(costs["local_latency"], costs["network_latency"])
    latency = np.where(inside, costs["local_latency"], longer)
    transfer = 2 * at.gradient_bytes / bandwidth
    ring = 2 * (at.devices - 1) * latency + transfer * (at.devices - 1) / at.devices
    tree = 2 * np.log2(at.devices) * latency + transfer
    return np.minimum(ring, np.where(at.devices > 1, tree, 0.0))


# --- the sampler ----------------------------------------------------------------------------------


class _Target:
    """The likelihood of rows, of positions in which every prior is a standard normal."""

    def __init__(self, rows: Sequence[Row], priors: Mapping[str, Prior]) -> None:
        # Repeats are one point, which the model times once.
        every = [(row.work, row.devices, row.nodes) for row in rows]
        points = list(dict.fromkeys(every))
        self._points = _Points.of(points)
        self._medians = np.log([prior.median for prior in priors.values()])
        self._scales = np.log([prior.factor for prior in priors.values()])
        found = [
            (name, points.index(at), s, row.resolution_s.get(name, 0.0) / s)
            for at, row in zip(every, rows, strict=True)
            for name, s in row.seconds.items()
        ]
        self._timed = list(dict.fromkeys((name, point) for name, point, *_ in found))
        self._which = [self._timed.index((name, point)) for name, point, *_ in found]
        self._logs = np.log([s for _, _, s, _ in found])
        self._resolution = np.array([share for *_, share in found])

    def costs(self, positions: Array) -> dict[str, Array]:
        """Costs of shape (draws, 1), of positions of shape (draws, priors)."""
        values = np.exp(self._medians + positions * self._scales)
        return {name: values[:, i : i + 1] for i, name in enumerate(_NAMES)}

    def log_likelihood(self, positions: Array) -> Array:
        """Shape (draws,), of positions of shape (draws, priors)."""
        costs = self.costs(positions)
        phases = phase_seconds(costs, self._points)
        phases[TOTAL] = sum((phases[name] for name in PHASES), np.zeros(1))
        expected = np.stack([phases[name][:, point] for name, point in self._timed], axis=1)
        variance = costs["noise"] ** 2 + self._resolution**2
        distance = self._logs - np.log(np.maximum(expected, 1e-300))[:, self._which]
        found: Array = -0.5 * np.sum(distance**2 / variance + np.log(variance), axis=1)
        return found


def sample(log_likelihood: Any, dimensions: int, generator: np.random.Generator) -> Array:
    """Draws of a posterior whose prior is standard normal, shape (PARTICLES, dimensions)."""
    positions = generator.standard_normal((PARTICLES, dimensions))
    likelihood = log_likelihood(positions)
    temperature = 0.0
    while temperature < 1:
        rise = _rise(likelihood, 1 - temperature)
        temperature = min(1.0, temperature + rise)
        weights = np.exp(rise * (likelihood - likelihood.max()))
        chosen = _systematic(weights / weights.sum(), generator)
        positions, likelihood = positions[chosen], likelihood[chosen]
        moves = 4 * _MOVES if temperature == 1 else _MOVES
        positions, likelihood = _move(
            log_likelihood, positions, likelihood, temperature, moves, generator
        )
    return positions


def _rise(likelihood: Array, left: float) -> float:
    """The step of temperature that leaves half of the particles effective; at most what is left."""
    low, high = 0.0, left
    if _effective(likelihood, high) >= _EFFECTIVE_SHARE:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _effective(likelihood, middle) >= _EFFECTIVE_SHARE else (low, middle)
        )
    return max(low, 1e-9)


def _effective(likelihood: Array, rise: float) -> float:
    """Kish's effective share of weighted particles."""
    weights = np.exp(rise * (likelihood - likelihood.max()))
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def _systematic(weights: Array, generator: np.random.Generator) -> NDArray[np.intp]:
    """Indices drawn by systematic resampling."""
    places = (generator.random() + np.arange(len(weights))) / len(weights)
    found: NDArray[np.intp] = np.searchsorted(np.cumsum(weights), places)
    return np.minimum(found, len(weights) - 1)


def _move(
    log_likelihood: Any,
    positions: Array,
    likelihood: Array,
    temperature: float,
    moves: int,
    generator: np.random.Generator,
) -> tuple[Array, Array]:
    """Metropolis steps of all particles; their own covariance shapes the proposals."""
    count, dimensions = positions.shape
    spread = np.cov(positions.T) + 1e-9 * np.eye(dimensions)
    root = np.linalg.cholesky(spread)
    scale = 2.4 / math.sqrt(dimensions)
    for _ in range(moves):
        proposed = positions + scale * generator.standard_normal((count, dimensions)) @ root.T
        found = log_likelihood(proposed)
        gain = temperature * (found - likelihood)
        gain = gain + 0.5 * np.sum(positions**2 - proposed**2, axis=1)
        taken = np.log(generator.random(count)) < gain
        positions = np.where(taken[:, None], proposed, positions)
        likelihood = np.where(taken, found, likelihood)
        scale *= math.exp(np.mean(taken) - 0.25)  # towards one acceptance in four
    return positions, likelihood
