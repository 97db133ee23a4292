"""`slurmft compare`: what differs between two runs, and whether it is more than noise."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from slurmft import runs, selection
from slurmft.cli import Parser
from slurmft.errors import Exit, UsageError, run_main
from slurmft.rundir import to_json
from slurmft.runs import MeasuredRun, is_number

Array = NDArray[np.float64]

_DRAWS = 2000
_LEAST_REPEATS = 3
_LEAST_WINDOWS = 10
_LEAST_BLOCKS = 4
_WARM_UP = 0.1
_ALIKE = 1e-9
"""Ratios nearer to 1 are rounding."""

_DESCRIPTION = """\
Says what differs between two runs (configuration, versions, hosts, code), and whether one is faster
or more accurate by more than noise. Each is a run directory, or a folder with repeats of one run:
with three or more on either side, repeats are compared; with fewer, the steps of the runs, which
cannot know how much repeats would differ. A verdict is for 95 % confidence.
"""

EXAMPLES = """\
examples:
  slurmft compare runs/emotion-20261120-093012-a1b2 runs/emotion-20261120-101533-c3d4
  slurmft compare runs/fp32 runs/bf16                # folders with repeats
"""


@dataclass(frozen=True, slots=True)
class Side:
    """The repeats of one measurement."""

    name: str
    """What it is called in the output: A or B."""
    runs: tuple[MeasuredRun, ...]
    notes: tuple[str, ...] = ()

    def results(self, key: str) -> list[Any]:
        """A value of every result."""
        return [run.result.get(key) for run in self.runs if run.result]

    def mean(self, key: str) -> float:
        return float(np.mean(self.results(key)))


@dataclass(frozen=True, slots=True)
class Windows:
    """The steps of one run, in the order in which they count, without warm-up."""

    steps: Array
    """Steps of each window, shape (windows,)."""
    sample_s: Array
    """Seconds of a sample, over all devices, shape (windows,)."""
    left_out: int = 0
    """Windows of the warm-up."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was compared, and what came of it."""

    what: str
    a: str
    b: str
    verdict: str
    method: str = ""
    estimate: float | None = None
    """Speed of B over that of A, or the metric of B less that of A; None: cannot tell."""
    low: float | None = None
    high: float | None = None


def main(argv: list[str]) -> int:
    """`slurmft compare RUN_A RUN_B`."""
    parser = Parser(prog="slurmft compare", description=_DESCRIPTION, epilog=EXAMPLES)
    for name in "AB":
        parser.add_argument(
            name.lower(), metavar=f"RUN_{name}", help="run (path or name), or folder of repeats"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    arguments = parser.parse(argv)
    a, b = read("A", arguments.a), read("B", arguments.b)
    if shared := {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise UsageError(
            f"{str(min(shared))!r} is in A and in B", "give two runs, or folders that share none"
        )
    different = differences(a, b)
    findings = compare(a, b, np.random.default_rng(arguments.seed))
    warnings = [*a.notes, *b.notes, *cautions(a, b)]
    if arguments.json:
        print(to_json(as_json(a, b, different, findings, warnings), indent=2))
    else:
        print("\n".join(describe(a, b, different, findings, warnings)))
    return Exit.OK


def read(name: str, path: str) -> Side:
    """The finished runs of one side.

    Raises:
        UsageError: none has finished, or they are no repeats of one measurement.
    """
    found, problems = runs.find([selection.folder_of(path)])
    done = [run for run in found if run.is_finished]
    lacking = {run.path: words for run in done if (words := _lacks(run))}
    finished = tuple(run for run in done if run.path not in lacking)
    if lacking and not finished:
        which, words = next(iter(lacking.items()))
        raise UsageError(
            f"{path!r} holds no run to compare: the result of {which.name} has no usable {words}",
            "give runs whose result.json is as slurmft wrote it",
        )
    if not finished:
        raise UsageError(
            f"{path!r} holds no finished run, but {len(found)} other(s)",
            "wait for one (slurmft follow RUN), or go on with it: slurmft resume RUN",
        )
    if len(runs.cells(finished)) > 1:
        fields = ", ".join(runs.varied(finished))
        raise UsageError(
            f"the runs in {path!r} are no repeats: they differ in {fields}",
            "give a folder for each kind of run",
        )
    notes = [f"{name}: left out: {problem}" for problem in problems]
    notes += [
        f"{name}: left out: the result of {r.name} has no usable {w}" for r, w in lacking.items()
    ]
    if len(done) < len(found):
        notes.append(f"{name}: {len(found) - len(done)} run(s) have not finished: left out")
    return Side(name, finished, tuple(notes))


def _lacks(run: MeasuredRun) -> str:
    """The values of a result without which nothing can be compared; "" where it has all."""
    result = run.result or {}
    phases = result["phases_s"]
    usable = {
        "train_samples_per_s": is_number(result.get("train_samples_per_s"), above=0),
        "global_batch_size": is_number(result.get("global_batch_size"), above=0),
        "evaluate_samples": is_number(result.get("evaluate_samples")),
        "attempts": is_number(result.get("attempts", 1)),
        "phases_s": isinstance(phases, dict) and all(map(is_number, phases.values())),
        "metrics": isinstance(result["metrics"], dict),
    }
    return ", ".join(name for name, is_usable in usable.items() if not is_usable)


# --- what differs ---------------------------------------------------------------------------------


def differences(a: Side, b: Side) -> list[tuple[str, str, str]]:
    """What is not the same: name, value in A, value in B; fields first, then environment, code."""
    first, second = a.runs[0].fields, b.runs[0].fields
    names = list(dict.fromkeys((*first, *second)))
    found = [(n, _text(first.get(n)), _text(second.get(n))) for n in names]
    found += [(n, _each(a, of), _each(b, of)) for n, of in _FACTS.items()]
    packages = {p for side in (a, b) for run in side.runs for p in _versions(run)}
    for package in sorted(packages):
        of = _version_of(package)
        found.append((package, _each(a, of), _each(b, of)))
    return [(name, of_a, of_b) for name, of_a, of_b in found if of_a != of_b]


def _ranks(key: str) -> Callable[[MeasuredRun], Any]:
    """What the ranks of a run say of themselves, each value once."""
    return lambda run: ", ".join(
        dict.fromkeys(str(rank.get(key)) for rank in run.environment.get("ranks", []))
    )


def _resolved(key: str) -> Callable[[MeasuredRun], Any]:
    return lambda run: (run.result or {}).get(key)


_FACTS: dict[str, Callable[[MeasuredRun], Any]] = {
    "precision used": _resolved("precision"),
    "backend used": _resolved("backend"),
    "gradients sent as": lambda run: ((run.result or {}).get("gradients") or {}).get("used"),
    "processes": _resolved("world_size"),
    "parameters": _resolved("parameters"),
    "hosts": lambda run: ", ".join(run.hosts),
    "device": _ranks("device"),
    "threads": _ranks("threads"),
    "kernel": _ranks("kernel"),
    "Python": lambda run: run.environment.get("python"),
    "code": lambda run: run.code,
}
"""Name -> what a run says of what it ran on."""


def _versions(run: MeasuredRun) -> dict[str, str]:
    found: dict[str, str] = run.environment.get("versions", {})
    return found


def _version_of(package: str) -> Callable[[MeasuredRun], Any]:
    return lambda run: _versions(run).get(package)


def _each(side: Side, of: Callable[[MeasuredRun], Any]) -> str:
    return " | ".join(dict.fromkeys(_text(of(run)) for run in side.runs))


def _text(value: Any) -> str:
    return "-" if value in (None, "", [], ()) else str(value)


def cautions(a: Side, b: Side) -> list[str]:
    """What a reader must know before believing a verdict."""
    lines = []
    for key, name in _WORK.items():
        of_a, of_b = (" | ".join(dict.fromkeys(map(str, s.results(key)))) for s in (a, b))
        if of_a != of_b:
            lines.append(f"not the same work: {name} {of_a} in A, {of_b} in B")
    for side in (a, b):
        restarted = [r for r in side.runs if r.result and r.result.get("attempts", 1) > 1]
        if restarted:
            names = ", ".join(
                f"{r.name} ({(r.result or {})['attempts']} starts)" for r in restarted
            )
            lines.append(f"restarted: {names} in {side.name}; steps done again count once")
    lines.append(_order(a, b))
    if not _has_repeats(a, b):
        counts = f"{len(a.runs)} and {len(b.runs)} run(s)"
        lines.append(
            f"{counts}: how much repeats differ is not known; {_LEAST_REPEATS} of each show it"
        )
        dropped = [sum(w.left_out for w in map(windows, side.runs)) for side in (a, b)]
        lines.append(
            f"the first {_WARM_UP:.0%} of the steps' windows are left out as warm-up: "
            f"{dropped[0]} of A, {dropped[1]} of B"
        )
    return lines


_WORK = {
    "train_samples": "training samples",
    "steps": "optimizer steps",
    "global_batch_size": "global batch",
    "evaluate_samples": "evaluated samples",
}
"""Values of a result that say how much a run did."""


def _order(a: Side, b: Side) -> str:
    """Whether the sides ran in turn: a machine changes over time."""
    times = [[run.config.get("submission", {}).get("time", "") for run in s.runs] for s in (a, b)]
    if not all(all(side) for side in times):
        return "when they ran is not known"
    if max(times[0]) < min(times[1]) or max(times[1]) < min(times[0]):
        first, last = ("A", "B") if max(times[0]) < min(times[1]) else ("B", "A")
        since = ", ".join(f"{n} {t[0][:16]}" for n, t in zip("AB", times, strict=True))
        return (
            f"not in turn: all of {first} ran before {last} ({since}); the machine may have changed"
        )
    return "the runs of A and B were interleaved"


# --- whether it is noise --------------------------------------------------------------------------


def compare(a: Side, b: Side, generator: np.random.Generator) -> list[Finding]:
    """All that can be compared: speed of the phases, then metrics."""
    found = [_training(a, b, generator)]
    for what, key, unit in (
        ("evaluation", ("evaluate",), "evaluation"),
        ("metric", ("metric", "broadcast"), "metric"),
    ):
        found.append(_per_evaluation(what, key, unit, a, b, generator))
    names = [n for n in a.runs[0].result["metrics"] if n in b.runs[0].result["metrics"]]  # type: ignore[index]
    return found + [_metric(name, a, b, generator) for name in names]


def _has_repeats(a: Side, b: Side) -> bool:
    return min(len(a.runs), len(b.runs)) >= _LEAST_REPEATS


def _training(a: Side, b: Side, generator: np.random.Generator) -> Finding:
    if _has_repeats(a, b):
        times = [1 / np.array(side.results("train_samples_per_s")) for side in (a, b)]
        found = ratio_of_repeats(times[0], times[1], generator)
        rates = [1 / float(np.mean(t)) for t in times]
        shown = (_rate(a, rates[0]), _rate(b, rates[1]))
        return _speed("training", *shown, found, "bootstrap over repeats")
    sides = [[windows(run) for run in side.runs] for side in (a, b)]
    rates = [_mean_rate(side) for side in sides]
    shown = (_rate(a, rates[0]), _rate(b, rates[1]))
    interval = ratio_of_windows(sides[0], sides[1], generator)
    if interval is None:
        counts = [sum(len(w.steps) for w in side) for side in sides]
        return Finding(
            "training", *shown, f"cannot tell: too few steps ({counts[0]} and {counts[1]} windows "
            f"of them; {_LEAST_WINDOWS} are needed: lower --log-every, or more steps)",
        )  # fmt: skip
    return _speed("training", *shown, interval, "moving-block bootstrap over steps")


def _mean_rate(side: Sequence[Windows]) -> float:
    """Samples a second over all windows; NaN where there are none."""
    steps = sum(float(w.steps.sum()) for w in side)
    seconds = sum(float((w.steps * w.sample_s).sum()) for w in side)
    return steps / seconds if seconds else math.nan


def _rate(side: Side, rate: float) -> str:
    if math.isnan(rate):
        return "-"
    step_ms = 1000 * side.mean("global_batch_size") / rate
    return f"{rate:,.4g} samples/s, {step_ms:,.4g} ms a step"


def _per_evaluation(
    what: str, phases: tuple[str, ...], unit: str, a: Side, b: Side, generator: np.random.Generator
) -> Finding:
    """Phases that come once after each epoch: their seconds for a validation sample."""
    times = [[_sample_seconds(run, phases) for run in side.runs] for side in (a, b)]
    shown = (_each_ms(a, times[0]), _each_ms(b, times[1]))
    if not _has_repeats(a, b) or min(map(min, times)) <= 0:
        return Finding(
            what, *shown, f"cannot tell: {_LEAST_REPEATS} repeats of each are needed for the {unit}"
        )
    found = ratio_of_repeats(np.array(times[0]), np.array(times[1]), generator)
    return _speed(what, *shown, found, "bootstrap over repeats")


def _each_ms(side: Side, sample_s: Sequence[float]) -> str:
    samples = side.mean("evaluate_samples") / _evaluations(side)
    return f"{1000 * float(np.mean(sample_s)) * samples:,.4g} ms each"


def _sample_seconds(run: MeasuredRun, phases: Sequence[str]) -> float:
    result = run.result or {}
    seconds = sum(result["phases_s"].get(phase, 0.0) for phase in phases)
    return float(seconds / max(1, result["evaluate_samples"]))


def _evaluations(side: Side) -> int:
    """How often the first run evaluated."""
    epochs = {r.get("epoch") for r in side.runs[0].records("epoch")}
    return len(epochs) or int(side.runs[0].value("epochs") or 1)


def _speed(what: str, a: str, b: str, found: tuple[float, float, float], method: str) -> Finding:
    return Finding(what, a, b, verdict_of_speed(*found), method, *found)


def verdict_of_speed(ratio: float, low: float, high: float) -> str:
    """In words: what an interval of the speed of B over that of A says."""
    if low - 1 > _ALIKE:
        return f"B is {ratio:.2f} x faster (95 %: {low:.2f} to {high:.2f})"
    if 1 - high > _ALIKE:
        return f"B is {1 / ratio:.2f} x slower (95 %: {1 / high:.2f} to {1 / low:.2f})"
    return f"no difference beyond noise ({low:.2f} to {high:.2f})"


def _metric(name: str, a: Side, b: Side, generator: np.random.Generator) -> Finding:
    """A metric of both; runs that are alone have an interval only where it is an accuracy."""
    values = [np.array([_number(m.get(name)) for m in s.results("metrics")]) for s in (a, b)]
    means = [float(np.mean(v)) for v in values]
    shown = (f"{means[0]:.4f}", f"{means[1]:.4f}")
    if not np.isfinite(np.concatenate(values)).all():
        return Finding(name, *shown, "cannot tell: it is no number in some run")
    if _has_repeats(a, b):
        found = difference_of_repeats(values[0], values[1], generator)
        return Finding(name, *shown, verdict_of_metric(*found), "bootstrap over repeats", *found)
    samples = [round(side.mean("evaluate_samples") / _evaluations(side)) for side in (a, b)]
    if "accuracy" not in name or min(samples) < 1:
        return Finding(name, *shown, f"cannot tell: {_LEAST_REPEATS} repeats of each are needed")
    low, high = difference_of_shares(means[0], samples[0], means[1], samples[1])
    found = (means[1] - means[0], low, high)
    method = (
        f"binomial, of {samples[0]:,} and {samples[1]:,} validation samples as if drawn anew; "
        "not of repeats with other seeds"
    )
    return Finding(name, *shown, verdict_of_metric(*found), method, *found)


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def verdict_of_metric(difference: float, low: float, high: float) -> str:
    """In words: what an interval of the metric of B less that of A says."""
    if low > _ALIKE:
        return f"B is higher by {difference:.4f} (95 %: {low:.4f} to {high:.4f})"
    if high < -_ALIKE:
        return f"B is lower by {-difference:.4f} (95 %: {-high:.4f} to {-low:.4f})"
    return f"no difference beyond noise ({low:+.4f} to {high:+.4f})"


def windows(run: MeasuredRun) -> Windows:
    """The windows of a run's steps, without warm-up. Of steps that were done again after a restart,
    the last counts."""
    found: list[tuple[int, int, float]] = []  # last step, steps, samples/s
    steps = 0
    for record in run.records():
        if record.get("event") == "start":
            steps = 0
        if record.get("event") != "step" or not isinstance(record.get("step"), int):
            continue
        while found and found[-1][0] >= record["step"]:
            found.pop()
        steps += 1
        if is_number(record.get("samples_per_s"), above=0):
            found.append((record["step"], steps, record["samples_per_s"]))
            steps = 0
    left_out = math.ceil(_WARM_UP * len(found))
    kept = found[left_out:]
    return Windows(
        np.array([count for _, count, _ in kept], dtype=np.float64),
        1 / np.array([rate for _, _, rate in kept], dtype=np.float64),
        left_out,
    )


# --- statistics -----------------------------------------------------------------------------------


def ratio_of_repeats(
    a_s: Array, b_s: Array, generator: np.random.Generator
) -> tuple[float, float, float]:
    """Speed of B over that of A, with its 95 % interval, from the times of repeats.

    Args:
        a_s: seconds of the same work in each run of A, shape (repeats,).
        b_s: those of B, shape (repeats,).
        generator: of the resampling.
    """
    draws = [np.log(_resampled(times, generator)) for times in (a_s, b_s)]
    estimate = math.log(a_s.mean() / b_s.mean())
    low, high = _widened(draws[0] - draws[1], estimate, _freedom(draws, [len(a_s), len(b_s)]))
    return math.exp(estimate), math.exp(low), math.exp(high)


def difference_of_repeats(
    a: Array, b: Array, generator: np.random.Generator
) -> tuple[float, float, float]:
    """Mean of B less that of A, with its 95 % interval; arguments as of `ratio_of_repeats`."""
    draws = [_resampled(values, generator) for values in (a, b)]
    estimate = float(b.mean() - a.mean())
    return estimate, *_widened(draws[1] - draws[0], estimate, _freedom(draws, [len(a), len(b)]))


def _resampled(values: Array, generator: np.random.Generator) -> Array:
    """Means of bootstrap samples of n - 1 of n values, shape (_DRAWS,): those of n vary too little,
    by n / (n - 1) (Hesterberg 2015)."""
    chosen = generator.integers(len(values), size=(_DRAWS, len(values) - 1))
    means: Array = values[chosen].mean(axis=1)
    return means


def _freedom(draws: Sequence[Array], counts: Sequence[float]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a difference of two means.

    Args:
        draws: of each mean, shape (draws,).
        counts: independent values behind each.
    """
    variances = [float(np.var(d)) for d in draws]
    parts = sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    return sum(variances) ** 2 / parts if parts else min(counts) - 1


def _widened(draws: Array, estimate: float, freedom: float) -> tuple[float, float]:
    """The 95 % interval of draws around an estimate, widened as Student's t is wider than the
    normal distribution: a bootstrap of three values does not know how uncertain their spread is."""
    normal = float(stdtrit(np.inf, 0.975))
    factor = float(stdtrit(freedom, 0.975)) / normal
    # Resamples of few values have no tails: their quantiles may be nearer than their spread says.
    near = normal * float(draws.std())
    low, high = (float(q) - estimate for q in np.quantile(draws, (0.025, 0.975)))
    return estimate + factor * min(low, -near), estimate + factor * max(high, near)


def ratio_of_windows(
    a: Sequence[Windows], b: Sequence[Windows], generator: np.random.Generator
) -> tuple[float, float, float] | None:
    """Speed of B over that of A, with its 95 % interval, from the steps of one or two runs of each.

    The moving-block bootstrap (Künsch 1989): neighbouring windows are slow together, so blocks of
    them are drawn. None: there are too few.

    Args:
        a: the windows of each run of A.
        b: those of B.
        generator: of the resampling.
    """
    draws, means, blocks = [], [], []
    for side in (a, b):
        steps = np.concatenate([w.steps for w in side])
        seconds = np.concatenate([w.steps * w.sample_s for w in side])
        if len(steps) < _LEAST_WINDOWS:
            return None
        rho = autocorrelation(seconds / steps)
        length = block_length(rho, len(steps))
        if len(steps) < _LEAST_BLOCKS * length:
            return None
        blocks.append(len(steps) / length)
        mean = float(np.log(seconds.sum() / steps.sum()))
        drawn = np.log(_block_means(seconds, steps, length, generator))
        draws.append(mean + (drawn - mean) * _missed(rho, length))
        means.append(mean)
    estimate = means[0] - means[1]
    low, high = _widened(draws[0] - draws[1], estimate, _freedom(draws, blocks))
    return math.exp(estimate), math.exp(low), math.exp(high)


def autocorrelation(values: Array) -> float:
    """How much of a window's deviation the next one shares: the estimate with Kendall's correction
    of its bias, and half its standard error more, as too small a value is the worse mistake.

    Args:
        values: in the order of time, shape (windows,).
    """
    count = len(values)
    centred = values - values.mean()
    variance = float((centred**2).sum())
    if variance <= (_ALIKE * float(values.mean())) ** 2 * count:
        return 0.0
    rho = float((centred[1:] * centred[:-1]).sum()) / variance
    rho += (1 + 3 * rho) / count + 0.5 * math.sqrt((1 - rho**2) / count)
    return min(max(rho, 0.0), 0.9)


def block_length(rho: float, count: int) -> int:
    """The length of blocks: Andrews' (1991) for a first-order autoregression, with Bartlett's
    kernel, to which the moving-block bootstrap is equivalent; at least the cube root of the count.

    Args:
        rho: the autocorrelation.
        count: the windows that there are.
    """
    length = 1.1447 * float((4 * rho**2 / (1 - rho**2) ** 2 * count) ** (1 / 3))
    return math.ceil(max(length, float(count ** (1 / 3))))


def _missed(rho: float, length: int) -> float:
    """By how much means of an autoregression vary more than blocks of a finite length show."""
    lags = np.arange(1, length)
    shown = 1 + 2 * float(((1 - lags / length) * rho**lags).sum())
    return math.sqrt((1 + rho) / (1 - rho) / shown)


def _block_means(
    seconds: Array, steps: Array, length: int, generator: np.random.Generator
) -> Array:
    """Seconds a step over drawn blocks, shape (_DRAWS,).

    Args:
        seconds: of each window, shape (windows,).
        steps: of each window, shape (windows,).
        length: windows of a block.
        generator: of the drawing.
    """
    count = len(steps)
    drawn = max(1, round(count / length) - 1)  # one less than there are, as in `_resampled`
    starts = generator.integers(count - length + 1, size=(_DRAWS, drawn))
    sums = [np.concatenate(([0.0], np.cumsum(values))) for values in (seconds, steps)]
    totals = [(s[starts + length] - s[starts]).sum(axis=1) for s in sums]
    means: Array = totals[0] / totals[1]
    return means


def difference_of_shares(
    first: float, first_count: int, second: float, second_count: int
) -> tuple[float, float]:
    """The 95 % interval of the second share less the first (Newcombe 1998, hybrid score).

    Args:
        first: share of right answers of the first.
        first_count: answers of it.
        second: the same of the second.
        second_count: the same of the second.
    """
    low_1, high_1 = _wilson(first, first_count)
    low_2, high_2 = _wilson(second, second_count)
    difference = second - first
    return (
        difference - math.hypot(second - low_2, high_1 - first),
        difference + math.hypot(high_2 - second, first - low_1),
    )


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count)
    half *= math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return middle - half, middle + half


# --- output ---------------------------------------------------------------------------------------


def describe(
    a: Side,
    b: Side,
    different: Sequence[tuple[str, str, str]],
    findings: Sequence[Finding],
    warnings: Sequence[str],
) -> list[str]:
    """The whole comparison, as lines."""
    lines = [f"{side.name}: {_source(side)}" for side in (a, b)]
    lines += ["", "what differs" if different else "nothing differs that was recorded"]
    width = max((len(name) for name, _, _ in different), default=0)
    lines += [f"  {name:<{width}}  {of_a}  ->  {of_b}" for name, of_a, of_b in different]
    for finding in findings:
        lines += ["", f"{finding.what}: {finding.verdict}"]
        lines.append(f"  A {finding.a}; B {finding.b}")
        lines += [f"  by {finding.method}"] if finding.method else []
    return [*lines, "", *(f"note: {warning}" for warning in warnings)]


def _source(side: Side) -> str:
    first = side.runs[0]
    if len(side.runs) == 1:
        return str(first.path)
    return f"{len(side.runs)} runs in {Path(first.path).parent}"


def as_json(
    a: Side,
    b: Side,
    different: Sequence[tuple[str, str, str]],
    findings: Sequence[Finding],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The whole comparison, for programs."""
    return {
        **{side.name.lower(): [str(run.path) for run in side.runs] for side in (a, b)},
        "differences": [{"name": n, "a": of_a, "b": of_b} for n, of_a, of_b in different],
        "confidence": 0.95,
        "findings": [asdict(finding) for finding in findings],
        "notes": list(warnings),
    }


def _console() -> int:
    return run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(_console())
