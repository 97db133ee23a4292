"""How long a run takes on another number of devices: a model of its phases, fitted to runs.

The model, for n devices on N nodes:

- A run is start-up, optimizer steps, evaluations, metrics with their broadcast, and the rest.
- A step computes for (samples a device x time a sample + micro-steps x fixed cost), stretched by
  the slowest of n devices, and waits for what of the all-reduce the overlap does not hide.
- The all-reduce of V bytes takes 2(n-1)/n V / bandwidth, as a ring does (Patarasuk and Yuan 2009),
  and 2 log2(n) latencies, as a tree does (Sanders, Speck and Traeff 2009): NCCL and oneCCL choose
  the faster of the two. Over several nodes it is bounded by the slower link.
- DistributedDataParallel overlaps the all-reduce with the backward pass, bucket by bucket
  (Li et al. 2020); the last bucket never, the others for at most a share of the computation.
- A gather hands (n-1)/n of all predictions to a rank; metrics stored by every rank cost the main
  one a copy for each rank; a broadcast of a few numbers grows with the ranks.

The fit is least squares of logarithms. Three runs do not determine all costs, so the default of
every cost (`COSTS`) counts as one more measurement, with its factor as the error. Ranges are a
parametric bootstrap: the same fit, with times and defaults moved at random by their errors
(Oliver, He and Reynolds 1996). What no run shows is as uncertain as its default.
"""

import math
from collections.abc import Mapping, Sequence
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
"""The name of a time that is known as a whole only."""

MAX_DEVICES = 1024

_TIMES = (*PHASES, TOTAL)
_OF_EVALUATION = ("evaluate", "metric", "broadcast")

DRAWS = 200
"""Fits of the bootstrap, an even number."""

_NOISE = 0.03
"""Share by which a run differs from the model at least: repeats on a busy cluster differ by 1 to 5
percent."""
_LATENCY_S = 25e-6
"""Of one message: 5 us (NVLink, verbs) to 100 us (TCP)."""
_LAST_BUCKET = 0.25
"""Share of the gradients that is never hidden: the embedding's, a tenth to a half of a model."""
_OVERLAP = 0.6
"""Share of computing that hides the others: the backward pass is two thirds of a step."""


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
    parameters: float = 66.4e6
    tokens_per_sample: float | None = None
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
    """What a cost is before anything is measured, on any cluster."""

    default: float
    factor: float
    """The cost lies within default / factor and default x factor with a probability of 68 %."""


COSTS = {
    "sample": Cost(5e-3, 20),  # s: 0.5 ms (small model, GPU) to 1 s (large model, CPU)
    "step": Cost(12e-3, 2.5),  # s: starts 1,000 to 3,000 kernels of 5 to 10 us
    # Share a doubling: where times have exponential tails, the slowest of n rises with log n.
    "slowdown": Cost(0.04, 2),
    "local_bandwidth": Cost(12e9, 3),  # bytes/s: shared memory 4e9, PCIe 3 12e9, NVLink 40e9
    "network_bandwidth": Cost(3e9, 4),  # bytes/s: 10 Gbit/s Ethernet 1e9, HDR InfiniBand 25e9
    "forward": Cost(0.4, 1.5),  # share of a sample's training: a third, more in fp16
    "gather": Cost(2e-6, 8),  # s a sample: copies of 8 bytes 0.1 us, objects on all ranks 20 us
    "metric": Cost(0.5e-6, 5),  # s a sample: scikit-learn 0.1 us, Python some us
    "metric_copy": Cost(0.1e-6, 10),  # s a sample and rank: 3 us if all ranks store all
    "broadcast": Cost(15e-6, 3),  # s a rank: one message
    "remote": Cost(0.3, 2.5),  # share by which gathers between nodes are dearer than within one
    "startup": Cost(2.0, 4),  # s: from a loop's first step (0.5 s) to imports and data (30 s)
    "startup_doubling": Cost(0.2, 4),  # s a doubling: rendezvous, and trees of connections
    "rest": Cost(0.5, 4),  # s: saving the model, between phases
}
"""One set for all data. Rows of more nodes than were measured must never change a number here."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The median, and what lies below and above with a probability of 5 % each."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Self:
        low, median, high = (float(v) for v in np.quantile(draws, (0.05, 0.5, 0.95)))
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run on a number of devices, as draws of the bootstrap; all arrays have shape (draws,)."""

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


@dataclass(frozen=True, slots=True)
class Fit:
    """What the measured rows say of the costs, as draws of the bootstrap."""

    rows: tuple[Row, ...]
    costs: Mapping[str, Array]
    """Name -> draws, shape (draws, 1)."""
    covered: tuple[str, ...]
    """The phases that the rows were measured in; the others are left out of predictions."""
    noise: Array
    """Draws of the noise's factor, shape (draws,), the same for every prediction: ratios of two
    counts are not made uncertain by it twice."""

    def predict(self, devices: int, nodes: int, work: Workload | None = None) -> Prediction:
        """The time of a run on all these devices, on these nodes; without its work, of that of the
        first row."""
        work = work or self.rows[0].work
        found = phase_seconds(self.costs, quantities([(work, devices, nodes)]))
        parts = TRAIN_PARTS if "train" in self.covered else ()
        return Prediction(
            {name: found[name][:, 0] for name in self.covered},
            {name: found[name][:, 0] for name in parts},
            self.noise,
        )


def fit(rows: Sequence[Row], network_gbit_s: float | None = None, seed: int = 0) -> Fit:
    """The costs behind measured rows.

    Args:
        rows: one run each; one is enough, but then the defaults decide how it scales.
        network_gbit_s: line rate between nodes, if known: rows of one node say nothing of it.
        seed: of the bootstrap; the same rows and seed give the same draws.
    """
    if not rows or any(not 0 < s < math.inf for row in rows for s in row.seconds.values()):
        raise ValueError("a fit needs rows, and times above 0")
    costs = dict(COSTS)
    if network_gbit_s is not None:  # collectives reach two thirds to all of the line rate
        costs["network_bandwidth"] = Cost(0.8 * network_gbit_s * 1e9 / 8, 1.25)
    generator = np.random.default_rng(seed)
    noise, draws = _LeastSquares(rows, costs).bootstrap(generator)
    measured = {name for row in rows for name in row.seconds}
    covered = tuple(p for p in PHASES if p in measured or TOTAL in measured)
    return Fit(
        tuple(rows), _named(draws), covered, np.exp(noise * generator.standard_normal(DRAWS))
    )


# --- the model ------------------------------------------------------------------------------------


def quantities(runs: Sequence[tuple[Workload, int, int]]) -> Array:
    """What runs have to do, of their work, devices and nodes; shape (quantities, runs)."""
    found = [
        (devices, nodes, work.steps(devices), work.micro_steps, work.train_samples * work.epochs,
         work.epochs, work.evaluate_samples, work.parameters * 4)  # the last: bytes of gradients
        for work, devices, nodes in runs
    ]  # fmt: skip
    return np.array(found, dtype=np.float64).T


def phase_seconds(costs: Mapping[str, Array], runs: Array) -> dict[str, Array]:
    """Phase -> seconds, shape (draws, runs); also of the TOTAL, and of what training is made of.
    Of costs (name -> draws, shape (draws, 1)) and the quantities of the runs."""
    devices, nodes, steps, micro_steps, samples, epochs, evaluated, gradient_bytes = runs
    doublings = np.log2(devices)
    # What a rank gets from others, and how much dearer it is where they are on other nodes.
    foreign = (devices - 1) / devices
    dearer = 1 + costs["remote"] * (nodes > 1)
    computing = samples / devices * costs["sample"]
    starting = steps * micro_steps * costs["step"]
    busy = computing + starting
    reducing = all_reduce_seconds(costs, devices, nodes, gradient_bytes)
    hidden = _OVERLAP * busy / (steps * micro_steps)  # under the last micro-step alone
    exposed = np.maximum(reducing - hidden, _LAST_BUCKET * reducing)
    waiting = busy * costs["slowdown"] * doublings + steps * exposed
    evaluating = costs["sample"] * costs["forward"] / devices + foreign * costs["gather"] * dearer
    metric = costs["metric"] + costs["metric_copy"] * devices * dearer
    broadcast = costs["broadcast"] * (4 + (devices - 1) * dearer)  # a call costs some messages
    found = {
        "startup": costs["startup"] + costs["startup_doubling"] * doublings,
        "train": busy + waiting,
        "evaluate": epochs * evaluated * evaluating,
        "metric": epochs * evaluated * metric,
        "broadcast": epochs * (evaluated > 0) * broadcast,
        "rest": costs["rest"] + 0 * doublings,
    }
    total = sum(found.values(), np.zeros(1))
    return found | {TOTAL: total, "computing": computing, "starting": starting, "waiting": waiting}


def all_reduce_seconds(
    costs: Mapping[str, Array], devices: Array, nodes: Array, gradient_bytes: Array
) -> Array:
    """One all-reduce of all gradients, shape (draws, runs); 0 on one device."""
    slower = np.minimum(costs["local_bandwidth"], costs["network_bandwidth"])
    bandwidth = np.where(nodes > 1, slower, costs["local_bandwidth"])
    transfer: Array = 2 * (devices - 1) / devices * gradient_bytes / bandwidth
    return transfer + 2 * np.log2(devices) * _LATENCY_S


# --- the fit --------------------------------------------------------------------------------------


class _LeastSquares:
    """Times and costs as the model has them, against measured times and defaults; as logarithms."""

    def __init__(self, rows: Sequence[Row], costs: Mapping[str, Cost]) -> None:
        self._runs = quantities([(row.work, row.devices, row.nodes) for row in rows])
        found = [
            (_TIMES.index(name), i, s, row.resolution_s.get(name, 0.0) / s)
            for i, row in enumerate(rows)
            for name, s in row.seconds.items()
            if row.work.evaluate_samples or name not in _OF_EVALUATION
        ]
        phases, runs, seconds, self._resolution = np.array(found).reshape(-1, 4).T
        self._times = phases.astype(int), runs.astype(int)
        defaults, self._factors = np.log(list(costs.values())).T
        self._defaults = defaults
        self._targets = np.concatenate([np.log(seconds), defaults])

    def bootstrap(self, generator: np.random.Generator) -> tuple[float, Array]:
        """The share by which runs differ from the model, and fitted costs, shape (DRAWS, costs)."""
        errors = self._errors(_NOISE)
        best = self._solve(self._targets, errors, self._defaults)
        missed = (self._modelled(best[None])[0] - self._targets) / errors
        noise = _NOISE * max(1.0, float(np.sqrt(np.mean(missed[: len(self._resolution)] ** 2))))
        errors = self._errors(noise)
        moves = errors * generator.standard_normal((DRAWS // 2, len(errors)))
        # Opposite moves in pairs: their fits have a steadier median.
        targets = self._targets + np.concatenate([moves, -moves])
        return noise, np.array([self._solve(each, errors, best) for each in targets])

    def _errors(self, noise: float) -> Array:
        return np.concatenate([np.hypot(noise, self._resolution), self._factors])

    def _solve(self, targets: Array, errors: Array, start: Array) -> Array:
        from scipy.optimize import least_squares  # 0.4 s, which --help need not wait for

        def residuals(costs: Array) -> Array:
            return np.asarray((self._modelled(costs[None])[0] - targets) / errors)

        def jacobian(costs: Array) -> Array:
            moved = self._modelled(costs + 1e-4 * np.eye(len(costs) + 1, len(costs), -1))
            return np.asarray((moved[1:] - moved[0]) / 1e-4 / errors).T

        found = least_squares(residuals, start, jacobian, method="lm", xtol=1e-4, ftol=1e-4)
        return np.asarray(found.x)

    def _modelled(self, costs: Array) -> Array:
        """Measured times, then the costs, of costs of shape (draws, costs); all as logarithms."""
        seconds = phase_seconds(_named(costs), self._runs)
        times = np.stack([seconds[name] for name in _TIMES], axis=1)[:, *self._times]
        return np.hstack([np.log(times), costs])


def _named(costs: Array) -> dict[str, Array]:
    """Name -> costs of shape (draws, 1), of logarithms of shape (draws, costs)."""
    return dict(zip(COSTS, np.exp(costs.T)[:, :, None], strict=True))
