"""Compares two runs, or repeats of two: what differs, and whether the difference is noise."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.core.errors import UsageError
from slurmft.core.files import Shape, fits, is_number
from slurmft.plugins.studies import stats
from slurmft.plugins.studies.report.provenance import of_ranks, readers
from slurmft.plugins.studies.stats import Array
from slurmft.runs import resolve, scan
from slurmft.runs.scan import MeasuredRun

_LEAST_REPEATS = 3
_WARM_UP = 0.1
"""Share of a run's windows that is left out."""


@dataclass(frozen=True, slots=True)
class Side:
    """The repeats of one measurement."""

    name: str
    """A or B."""
    runs: tuple[MeasuredRun, ...]
    notes: tuple[str, ...] = ()
    """What was left out."""

    def results(self, key: str) -> list[Any]:
        return [run.result.get(key) for run in self.runs if run.result]

    def mean(self, key: str) -> float:
        return float(np.mean(self.results(key)))

    @property
    def evaluated(self) -> float:
        """Samples of one evaluation."""
        return self.mean("evaluate_samples") / self.runs[0].evaluations


@dataclass(frozen=True, slots=True)
class Finding:
    """A quantity of both sides, and the verdict."""

    what: str
    a: str
    b: str
    verdict: str
    method: str = ""
    estimate: float | None = None
    """Speed of B over that of A, or metric of B minus that of A; None: cannot tell."""
    low: float | None = None
    high: float | None = None


def compare(path_a: str, path_b: str) -> dict[str, Any]:
    """Compares two runs, or folders with repeats: all that `slurmft compare --json` says."""
    a, b = _read_side("A", path_a), _read_side("B", path_b)
    if shared := {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise UsageError(
            f"{str(min(shared))!r} is in A and in B", "give two runs, or folders that share none"
        )
    return {
        **{side.name.lower(): [str(run.path) for run in side.runs] for side in (a, b)},
        "differences": _differences(a, b),
        "confidence": 0.95,
        "findings": [asdict(finding) for finding in _findings(a, b)],
        "notes": [*a.notes, *b.notes, *_notes(a, b)],
    }


def _read_side(name: str, path: str) -> Side:
    found, problems = scan.find([resolve.folder_of(path)])
    done = [run for run in found if run.is_finished]
    usable = [run for run in done if not _lacks(run)]
    lacking = [f"the result of {r.name} has no usable {w}" for r in done if (w := _lacks(r))]
    if lacking and not usable:
        raise UsageError(
            f"{path!r} holds no run to compare: {lacking[0]}",
            "give runs whose result.json is unchanged",
        )
    if not usable:
        raise UsageError(
            f"{path!r} holds no finished run, but {len(found)} other(s)",
            "wait for one (slurmft follow RUN), or resume it: slurmft resume RUN",
        )
    if len(scan.cells(usable)) > 1:
        fields = ", ".join(scan.varied(usable))
        raise UsageError(
            f"the runs in {path!r} are not repeats: they differ in {fields}",
            "give a folder for each kind of run",
        )
    notes = [f"{name}: left out: {problem}" for problem in (*problems, *lacking)]
    if len(done) < len(found):
        notes.append(f"{name}: {len(found) - len(done)} run(s) have not finished: left out")
    return Side(name, tuple(usable), tuple(notes))


_NEEDED: dict[str, Shape] = {
    "train_samples_per_s": float, "global_batch_size": float, "evaluate_samples": float,
    "attempts": int, "phases_s": {...: float}, "metrics": dict,
}  # fmt: skip
_NEEDED_OF_OWN: dict[str, Shape] = {"attempts": int, "metrics": dict, "wall_s": float}
_ABOVE_0 = ("train_samples_per_s", "global_batch_size", "wall_s")


def _lacks(run: MeasuredRun) -> str:
    """The required values that a result lacks; "" if it has all."""
    result = {"attempts": 1} | (run.result or {})
    needed = _NEEDED_OF_OWN if run.is_own else _NEEDED
    return ", ".join(
        name
        for name, shape in needed.items()
        if not fits(result.get(name), shape) or (name in _ABOVE_0 and result[name] <= 0)
    )


# --- what differs ---------------------------------------------------------------------------------


def _differences(a: Side, b: Side) -> list[dict[str, str]]:
    """Name, value in A, value in B: of fields, then of the environment, then of packages."""
    first, second = a.runs[0].fields, b.runs[0].fields
    names = dict.fromkeys((*first, *second))
    found = [(n, _text(first.get(n)), _text(second.get(n))) for n in names]
    facts = _FACTS | readers([*a.runs, *b.runs])
    found += [(n, _each(a, of), _each(b, of)) for n, of in facts.items()]
    return [{"name": n, "a": of_a, "b": of_b} for n, of_a, of_b in found if of_a != of_b]


def _resolved(key: str) -> Callable[[MeasuredRun], Any]:
    return lambda run: (run.result or {}).get(key)


_FACTS: dict[str, Callable[[MeasuredRun], Any]] = {
    "precision used": _resolved("precision"),
    "backend used": _resolved("backend"),
    "gradients sent as": lambda run: ((run.result or {}).get("gradients") or {}).get("used"),
    "processes": _resolved("world_size"),
    "parameters": _resolved("parameters"),
    "hosts": lambda run: ", ".join(run.hosts),
    "threads": of_ranks("threads"),
    "kernel": of_ranks("kernel"),
}
"""Name -> what a run recorded."""


def _each(side: Side, of: Callable[[MeasuredRun], Any]) -> str:
    return " | ".join(dict.fromkeys(_text(of(run)) for run in side.runs))


def _text(value: Any) -> str:
    return "-" if value in (None, "", [], ()) else str(value)


def _notes(a: Side, b: Side) -> Iterator[str]:
    for key, name in _WORK.items():
        of_a, of_b = (" | ".join(dict.fromkeys(map(str, s.results(key)))) for s in (a, b))
        if of_a != of_b:
            yield f"not the same work: {name} {of_a} in A, {of_b} in B"
    for side in (a, b):
        starts = [(run.name, (run.result or {}).get("attempts", 1)) for run in side.runs]
        if names := ", ".join(f"{name} ({count} starts)" for name, count in starts if count > 1):
            yield f"restarted: {names} in {side.name}; repeated steps count once"
    yield _order(a, b)
    if _has_repeats(a, b):
        return
    counts = f"{len(a.runs)} and {len(b.runs)} run(s)"
    yield (f"{counts}: how much repeats differ is unknown; {_LEAST_REPEATS} of each would show it")
    if not _is_own(a, b):
        yield f"the first {_WARM_UP:.0%} of the steps are left out as warm-up"


_WORK = {
    "train_samples": "training samples",
    "steps": "optimizer steps",
    "global_batch_size": "global batch",
    "evaluate_samples": "evaluated samples",
}
"""Value of a result -> what it is: the work of a run."""


def _order(a: Side, b: Side) -> str:
    """Whether the sides were interleaved: a machine changes over time."""
    times = [[run.config["submission"].get("time", "") for run in s.runs] for s in (a, b)]
    if not all(all(side) for side in times):
        return "the times of the runs are unknown"
    if max(times[0]) < min(times[1]) or max(times[1]) < min(times[0]):
        first, last = ("A", "B") if max(times[0]) < min(times[1]) else ("B", "A")
        since = ", ".join(f"{n} {t[0][:16]}" for n, t in zip("AB", times, strict=True))
        text = f"not interleaved: all of {first} ran before {last} ({since})"
        return f"{text}; the machine may have changed"
    return "the runs of A and B were interleaved"


# --- whether it is noise --------------------------------------------------------------------------

_BY_REPEATS = "Welch's t-interval over repeats"
_TOO_FEW = f"cannot tell: {_LEAST_REPEATS} repeats of each are needed"


def _findings(a: Side, b: Side) -> list[Finding]:
    """Speed of the phases, or of the whole, then metrics."""
    if _is_own(a, b):
        found = [_by_repeats("time", _whole, a, b)]
    else:
        by_steps = not _has_repeats(a, b)
        training = _by_steps(a, b) if by_steps else _by_repeats("training", _training, a, b)
        found = [training, _by_repeats("evaluation", _evaluation, a, b)]
    first, second = (side.results("metrics")[0] for side in (a, b))
    return found + [_metric(name, a, b) for name in first if name in second]


def _is_own(a: Side, b: Side) -> bool:
    """Whether a side is a program of the user's own, of which no phases are known."""
    return any(run.is_own for run in (*a.runs, *b.runs))


def _has_repeats(a: Side, b: Side) -> bool:
    return min(len(a.runs), len(b.runs)) >= _LEAST_REPEATS


Times = tuple[str, stats.Array]
"""In words, and the seconds of the same work in each run, shape (repeats,)."""


def _by_repeats(what: str, times_of: Callable[[Side], Times], a: Side, b: Side) -> Finding:
    (shown_a, a_s), (shown_b, b_s) = times_of(a), times_of(b)
    if not _has_repeats(a, b) or min(*a_s, *b_s) <= 0:
        return Finding(what, shown_a, shown_b, _TOO_FEW)
    found = stats.ratio_of_repeats(a_s, b_s)
    return Finding(what, shown_a, shown_b, verdict_of_speed(*found), _BY_REPEATS, *found)


def _whole(side: Side) -> Times:
    times = np.array(side.results("wall_s"), dtype=np.float64)
    return f"{times.mean():,.4g} s", times


def _training(side: Side) -> Times:
    times = 1 / np.array(side.results("train_samples_per_s"), dtype=np.float64)
    return _rate(side, 1 / float(times.mean())), times


def _evaluation(side: Side) -> Times:
    """With their metrics, for a validation sample."""
    phases, samples = side.results("phases_s"), side.results("evaluate_samples")
    seconds = [sum(p.get(n, 0.0) for n in ("evaluate", "metric", "broadcast")) for p in phases]
    times = np.array(seconds) / np.maximum(1, samples)
    return f"{1000 * float(times.mean()) * side.evaluated:,.4g} ms each", times


def _by_steps(a: Side, b: Side) -> Finding:
    """The training of runs without repeats."""
    sides = [np.concatenate([windows(run) for run in side.runs], axis=1) for side in (a, b)]
    shown = _rate(a, _mean_rate(sides[0])), _rate(b, _mean_rate(sides[1]))
    found = stats.ratio_of_windows(*sides)
    if found is None:
        counts = [side.shape[1] for side in sides]
        return Finding(
            "training", *shown, f"cannot tell: too few steps ({counts[0]} and {counts[1]} windows "
            f"of them; {stats.LEAST_WINDOWS} are needed: lower --log-every, or more steps)",
        )  # fmt: skip
    method = "t-interval over steps, as many as are independent"
    return Finding("training", *shown, verdict_of_speed(*found), method, *found)


def _mean_rate(windows: Array) -> float:
    """Samples a second over all windows; NaN where there are none."""
    steps, sample_s = windows
    seconds = float((steps * sample_s).sum())
    return float(steps.sum()) / seconds if seconds else math.nan


def _rate(side: Side, rate: float) -> str:
    if math.isnan(rate):
        return "-"
    step_ms = 1000 * side.mean("global_batch_size") / rate
    return f"{rate:,.4g} samples/s, {step_ms:,.4g} ms a step"


def verdict_of_speed(ratio: float, low: float, high: float) -> str:
    """An interval of the speed of B over that of A, in words."""
    if low - 1 > stats.ALIKE:
        return f"B is {ratio:.2f} x faster (95 %: {low:.2f} to {high:.2f})"
    if 1 - high > stats.ALIKE:
        return f"B is {1 / ratio:.2f} x slower (95 %: {1 / high:.2f} to {1 / low:.2f})"
    return f"no difference beyond noise ({low:.2f} to {high:.2f})"


def _metric(name: str, a: Side, b: Side) -> Finding:
    """A metric of both; without repeats, only an accuracy has an interval."""
    given = [[m.get(name) for m in side.results("metrics")] for side in (a, b)]
    values = [np.array([v if is_number(v) else math.nan for v in found]) for found in given]
    means = [float(np.mean(v)) for v in values]
    shown = (f"{means[0]:.4f}", f"{means[1]:.4f}")
    if not np.isfinite(np.concatenate(values)).all():
        return Finding(name, *shown, "cannot tell: it is not a number in some run")
    if _has_repeats(a, b):
        found = stats.difference_of_repeats(values[0], values[1])
        return Finding(name, *shown, verdict_of_metric(*found), _BY_REPEATS, *found)
    is_share = "accuracy" in name and not _is_own(a, b)
    samples = [round(side.evaluated) if is_share else 0 for side in (a, b)]
    if min(samples) < 1:
        return Finding(name, *shown, _TOO_FEW)
    low, high = stats.difference_of_shares(means[0], samples[0], means[1], samples[1])
    found = (means[1] - means[0], low, high)
    method = (
        f"binomial intervals, for {samples[0]:,} and {samples[1]:,} validation samples; not for "
        "repeats with other seeds"
    )
    return Finding(name, *shown, verdict_of_metric(*found), method, *found)


def verdict_of_metric(difference: float, low: float, high: float) -> str:
    """An interval of the metric of B minus that of A, in words."""
    if low > stats.ALIKE:
        return f"B is higher by {difference:.4f} (95 %: {low:.4f} to {high:.4f})"
    if high < -stats.ALIKE:
        return f"B is lower by {-difference:.4f} (95 %: {-high:.4f} to {-low:.4f})"
    return f"no difference beyond noise ({low:+.4f} to {high:+.4f})"


def windows(run: MeasuredRun) -> Array:
    """The windows of a run's steps, in order, without warm-up; see `stats.ratio_of_windows`. Steps
    that were repeated after a restart count once, the last time."""
    found: list[tuple[int, int, float]] = []  # last step, steps, samples/s
    steps = 0
    for record in run.records():
        if record["event"] == "start":
            steps = 0
        if record["event"] != "step":
            continue
        while found and found[-1][0] >= record["step"]:
            found.pop()
        steps += record["steps"] if is_number(record.get("steps")) else 1
        if (record.get("samples_per_s") or 0) > 0:
            found.append((record["step"], steps, record["samples_per_s"]))
            steps = 0
    kept = found[math.ceil(_WARM_UP * len(found)) :]
    _, counts, rates = np.array(kept, dtype=np.float64).reshape(-1, 3).T
    return np.array([counts, 1 / rates])


# --- output ---------------------------------------------------------------------------------------


def describe_comparison(found: dict[str, Any]) -> list[str]:
    """The whole comparison, as lines."""
    paths = [found[name] for name in "ab"]
    sources = [p[0] if len(p) == 1 else f"{len(p)} runs in {Path(p[0]).parent}" for p in paths]
    lines = [f"{name}: {source}" for name, source in zip("AB", sources, strict=True)]
    differences, findings = found["differences"], found["findings"]
    lines += ["", "what differs" if differences else "nothing differs that was recorded"]
    width = max((len(each["name"]) for each in differences), default=0)
    lines += [f"  {each['name']:<{width}}  {each['a']}  ->  {each['b']}" for each in differences]
    for finding in findings:
        lines += ["", f"{finding['what']}: {finding['verdict']}"]
        lines.append(f"  A {finding['a']}; B {finding['b']}")
        lines += [f"  by {finding['method']}"] if finding["method"] else []
    return [*lines, "", *(f"note: {note}" for note in found["notes"])]
