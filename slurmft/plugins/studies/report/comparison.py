"""Compares two runs, or repeats of two: what differs, and whether the difference is noise."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.core.decode import NullIsNaN, decode_or_none, matches
from slurmft.core.errors import UsageError
from slurmft.core.run_records import Record, Start, Step
from slurmft.core.text import number
from slurmft.plugins.studies import cells, stats
from slurmft.plugins.studies.report.findings import (
    ComparisonFacts,
    Difference,
    Finding,
)
from slurmft.plugins.studies.report.provenance import of_ranks, readers
from slurmft.plugins.studies.stats import Array
from slurmft.plugins.studies.table import setting_text
from slurmft.runs import resolve, scan
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_LEAST_REPEATS = 3
"""Two of each leave Welch's t-interval one or two degrees of freedom: it would be too wide."""
_WARM_UP = 0.1
"""Share of a run's windows that is left out, from the first one on."""


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
    def validation_samples(self) -> float:
        """Samples of one evaluation of the validation data."""
        return float(np.mean([run.validation_samples for run in self.runs]))

    @property
    def test_samples(self) -> float:
        """Samples of the test split."""
        return float(np.mean([run.test_samples for run in self.runs]))

    @property
    def times_s(self) -> list[float]:
        """When the runs began (Unix seconds; 0: unknown): a study submits all its runs at once."""
        times_s = []
        for run in self.runs:
            history = RunDir(run.path).history()
            began = (each.time for each in history if each.state == "running")
            times_s.append(next(began, 0.0))
        return times_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides with their differences."""

    a: Side
    b: Side
    differences: list[Difference]
    findings: list[Finding]
    notes: list[str]

    def as_json(self) -> ComparisonFacts:
        return ComparisonFacts(
            a=[str(run.path) for run in self.a.runs],
            b=[str(run.path) for run in self.b.runs],
            differences=self.differences,
            # Of all intervals: `stats` has the quantiles of 95 % alone.
            confidence=0.95,
            findings=self.findings,
            notes=self.notes,
        )

    def lines(self) -> list[str]:
        """The comparison as text."""
        lines = []
        for side in (self.a, self.b):
            source = _source_of(side)
            lines.append(f"{side.name}: {source}")
        lines.append("")
        if self.differences:
            lines.append("what differs")
        else:
            lines.append("nothing differs that was recorded")
        widths = [len(each.name) for each in self.differences]
        width = max(widths, default=0)
        for each in self.differences:
            name = f"{each.name:<{width}}"
            lines.append(f"  {name}  {each.a}  ->  {each.b}")
        for finding in self.findings:
            lines.append("")
            lines.append(f"{finding.what}: {finding.verdict}")
            lines.append(f"  A {finding.a}; B {finding.b}")
            if finding.method:
                lines.append(f"  by {finding.method}")
        lines.append("")
        lines += [f"note: {note}" for note in self.notes]
        return lines

    def summary(self, label_a: str, label_b: str) -> list[str]:
        """The verdicts, a line each, for a report whose tables show the rest."""
        lines = [f"A is {label_a}; B is {label_b}"]
        for finding in self.findings:
            lines.append(f"{finding.what}: {finding.verdict}")
        return lines + self.notes


def _source_of(side: Side) -> str:
    first = side.runs[0].path
    if len(side.runs) == 1:
        return str(first)
    return f"{len(side.runs)} runs in {first.parent}"


def compare(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Compares two runs, or folders with repeats.

    Raises:
        UsageError: a path holds no finished run, or runs that are not repeats of one measurement;
            or a run is in both.
    """
    a = _read_side("A", str(path_a))
    b = _read_side("B", str(path_b))
    # Resolved: `last` is a link, and a run would differ from itself by nothing.
    paths_a = {run.path.resolve() for run in a.runs}
    paths_b = {run.path.resolve() for run in b.runs}
    shared = paths_a & paths_b
    if shared:
        raise UsageError(
            f"{str(min(shared))!r} is in A and in B",
            "give two runs, or folders that share none",
        )
    return _compare_sides(a, b)


def compare_cells(
    runs_a: Sequence[MeasuredRun], runs_b: Sequence[MeasuredRun]
) -> Comparison | None:
    """Compares the runs of two cells; None: one of them has no finished run."""
    a = _comparable(runs_a)
    b = _comparable(runs_b)
    if not a or not b:
        return None
    return _compare_sides(Side("A", a), Side("B", b))


def _comparable(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    comparable = []
    for run in runs:
        if run.is_finished and not _missing_values(run):
            comparable.append(run)
    return tuple(comparable)


def _compare_sides(a: Side, b: Side) -> Comparison:
    notes = [*a.notes, *b.notes]
    notes += _notes(a, b)
    return Comparison(
        a=a,
        b=b,
        differences=_differences(a, b),
        findings=_findings(a, b),
        notes=notes,
    )


def _read_side(name: str, path: str) -> Side:
    all_runs, problems = scan.find([resolve.folder_of(path)])
    runs = scan.trainings(all_runs, path)
    finished = [run for run in runs if run.is_finished]
    usable = []
    lacking = []
    for run in finished:
        missing = _missing_values(run)
        if missing:
            lacking.append(f"the result of {run.name} has no usable {missing}")
        else:
            usable.append(run)
    # A finished run whose values were edited tells more than one that goes on: it is named first.
    if lacking and not usable:
        raise UsageError(
            f"{path!r} holds no run to compare: {lacking[0]}",
            "give runs whose result.json is unchanged",
        )
    if not usable:
        raise UsageError(
            f"{path!r} holds no finished run, but {len(runs)} other(s)",
            scan.what_now(runs),
        )
    # Repeats have the same settings but for their seeds: one cell holds all of them.
    if len(cells.cells(usable)) > 1:
        fields = ", ".join(cells.varied(usable))
        raise UsageError(
            f"the runs in {path!r} are not repeats: they differ in {fields}",
            "give a folder for each kind of run",
        )
    notes = []
    for problem in (*problems, *lacking):
        notes.append(f"{name}: left out: {problem}")
    unfinished_count = len(runs) - len(finished)
    if unfinished_count:
        notes.append(f"{name}: {unfinished_count} run(s) have not finished: left out")
    return Side(name, tuple(usable), tuple(notes))


_NEEDED: dict[str, Any] = {
    "train_samples_per_s": float,
    "global_batch_size": float,
    "evaluate_samples": float,
    "attempts": int,
    "phases_s": dict[str, float],
    "metrics": dict[str, Any],
}
"""Value of a training's result that a comparison reads -> its type."""
_NEEDED_OF_PROGRAM: dict[str, Any] = {
    "attempts": int,
    "metrics": dict[str, Any],
    "wall_s": float,
}
"""Those of a program of the user's own, of which no phases or samples are known."""
_ABOVE_0 = ("train_samples_per_s", "global_batch_size", "wall_s")
"""Values of which 0 would be no measurement, and would break the rates or their logarithms."""


def _attempts(run: MeasuredRun) -> Any:
    """Returns how often the job of a run started; 1 where its result does not say it."""
    return (run.result or {}).get("attempts", 1)


def _missing_values(run: MeasuredRun) -> str:
    """Returns the required values that a result lacks; "" if it has all."""
    result = dict(run.result or {})
    result["attempts"] = _attempts(run)
    needed = _NEEDED_OF_PROGRAM if run.is_own_program else _NEEDED
    missing = []
    for name, kind in needed.items():
        is_usable = matches(result.get(name), kind)
        if is_usable and name in _ABOVE_0:
            is_usable = result[name] > 0
        if not is_usable:
            missing.append(name)
    return ", ".join(missing)


# --- what differs ---------------------------------------------------------------------------------


def _differences(a: Side, b: Side) -> list[Difference]:
    """Lists the settings that differ, then the environment, then packages."""
    # The runs of a side are repeats: they have the same settings.
    fields_a = cells.fields_of(a.runs[0])
    fields_b = cells.fields_of(b.runs[0])
    pairs = []
    # Programs of other kinds have other settings. Not a set, which has no order.
    for name in dict.fromkeys((*fields_a, *fields_b)):
        # A setting that one side does not have is shown as "-".
        text_a = _text(fields_a.get(name))
        text_b = _text(fields_b.get(name))
        pairs.append(Difference(name, text_a, text_b))
    runs = [*a.runs, *b.runs]
    facts = _FACTS | readers(runs)
    for name, reader in facts.items():
        # What a run recorded may differ between repeats: all their values count.
        text_a = _distinct(a, reader)
        text_b = _distinct(b, reader)
        pairs.append(Difference(name, text_a, text_b))
    return [pair for pair in pairs if pair.a != pair.b]


def _from_result(key: str) -> Callable[[MeasuredRun], Any]:
    return lambda run: (run.result or {}).get(key)


def _gradients_used(run: MeasuredRun) -> Any:
    """Returns the format in which a run sent gradients; it may be another one than configured."""
    gradients = (run.result or {}).get("gradients")
    return (decode_or_none(gradients, dict[str, Any]) or {}).get("used")


_FACTS: dict[str, Callable[[MeasuredRun], Any]] = {
    "precision used": _from_result("precision"),
    "backend used": _from_result("backend"),
    "gradients sent as": _gradients_used,
    "processes": _from_result("world_size"),
    "parameters": _from_result("parameters"),
    "hosts": lambda run: ", ".join(run.hosts),
    "threads": of_ranks("threads"),
    "kernel": of_ranks("kernel"),
}
"""Name -> what a run recorded."""


def _distinct(side: Side, reader: Callable[[MeasuredRun], Any]) -> str:
    texts = [_text(reader(run)) for run in side.runs]
    return _joined(texts)


def _joined(values: Sequence[Any]) -> str:
    """Returns the distinct values as text, in their order."""
    texts = [str(value) for value in values]
    return " | ".join(dict.fromkeys(texts))


def _text(value: Any) -> str:
    if value in (None, "", [], ()):  # but not 0 or False
        return "-"
    return setting_text(value)


_WORK = {
    "train_samples": "training samples",
    "steps": "optimizer steps",
    "global_batch_size": "global batch",
    "evaluate_samples": "evaluated samples",
}
"""Value of a result -> what it is: the work of a run."""


def _notes(a: Side, b: Side) -> Iterator[str]:
    for key, name in _WORK.items():
        work_a = _joined(a.results(key))
        work_b = _joined(b.results(key))
        if work_a != work_b:
            yield f"not the same work: {name} {work_a} in A, {work_b} in B"
    for side in (a, b):
        restarted = []
        for run in side.runs:
            attempts = _attempts(run)
            if attempts > 1:
                restarted.append(f"{run.name} ({attempts} starts)")
        if restarted:
            names = ", ".join(restarted)
            yield f"restarted: {names} in {side.name}; repeated steps count once"
    yield _order_note(a, b)
    # The other notes are on what single runs cannot show.
    if _has_repeats(a, b):
        return
    counts = f"{len(a.runs)} and {len(b.runs)} run(s)"
    yield f"{counts}: how much repeats differ is unknown; {_LEAST_REPEATS} of each would show it"
    if not _has_own_program(a, b):
        yield f"the first {_WARM_UP:.0%} of the steps are left out as warm-up"


def _order_note(a: Side, b: Side) -> str:
    """Says whether the sides were interleaved: a machine changes over time."""
    a_s, b_s = a.times_s, b.times_s
    if not all((*a_s, *b_s)):
        return "the times of the runs are unknown"
    if max(a_s) < min(b_s):
        first, last = a, b
    elif max(b_s) < min(a_s):
        first, last = b, a
    else:
        return "the runs of A and B were interleaved"
    since_a = _minute(a_s[0])
    since_b = _minute(b_s[0])
    return (
        f"not interleaved: all of {first.name} ran before {last.name} "
        f"({a.name} {since_a}, {b.name} {since_b}); the machine may have changed"
    )


def _minute(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M")


# --- whether it is noise --------------------------------------------------------------------------

_BY_REPEATS = "Welch's t-interval over repeats"
_TOO_FEW = f"cannot tell: {_LEAST_REPEATS} repeats of each are needed"


def _findings(a: Side, b: Side) -> list[Finding]:
    """Compares the speed of the phases, or of the whole run, then the metrics."""
    if _has_own_program(a, b):
        findings = [_by_repeats("time", _whole, a, b)]
    else:
        # Steps vary less than runs do: they stand in only where repeats lack.
        if _has_repeats(a, b):
            training = _by_repeats("training", _training, a, b)
        else:
            training = _by_steps(a, b)
        # Evaluations are few in a run: only repeats give their time an interval.
        evaluation = _by_repeats("evaluation", _evaluation, a, b)
        findings = [training, evaluation]
    metrics_a = a.results("metrics")[0]  # repeats have the same metrics
    metrics_b = b.results("metrics")[0]
    for name in metrics_a:
        if name in metrics_b:
            findings.append(_metric(name, a, b))
    return findings


def _has_own_program(a: Side, b: Side) -> bool:
    """Returns whether a side is a program of the user's own, of which no phases are known."""
    runs = [*a.runs, *b.runs]
    return any(run.is_own_program for run in runs)


def _has_repeats(a: Side, b: Side) -> bool:
    return min(len(a.runs), len(b.runs)) >= _LEAST_REPEATS


Times = tuple[str, Array]
"""A time as text, and the seconds of the same work in each run, shape (repeats,)."""


def _by_repeats(
    what: str,
    times_of: Callable[[Side], Times],
    a: Side,
    b: Side,
) -> Finding:
    text_a, a_s = times_of(a)
    text_b, b_s = times_of(b)
    # A phase may have taken no measurable time; a ratio needs more than 0.
    shortest_s = min(*a_s, *b_s)
    if not _has_repeats(a, b) or shortest_s <= 0:
        return Finding(what, text_a, text_b, _TOO_FEW)
    # A ratio, not a difference: it says the same of short runs and of long ones.
    interval = stats.ratio_of_repeats(a_s, b_s)
    verdict = verdict_of_speed(*interval)
    return Finding(what, text_a, text_b, verdict, _BY_REPEATS, *interval)


def _whole(side: Side) -> Times:
    """The time of the whole run."""
    times = np.array(side.results("wall_s"), dtype=np.float64)
    return f"{times.mean():,.4g} s", times


def _training(side: Side) -> Times:
    """The time of one training sample."""
    times = 1 / np.array(side.results("train_samples_per_s"), dtype=np.float64)
    # The rate of all repeats together: the mean of the rates would favour the fast ones.
    rate = 1 / float(times.mean())
    return _rate(side, rate), times


def _evaluation(side: Side) -> Times:
    """The time of one validation sample, with its share of the metrics."""
    seconds = []
    for phases_s in side.results("phases_s"):
        evaluation_s = 0.0
        for name in ("evaluate", "metric", "broadcast"):
            evaluation_s += phases_s.get(name, 0.0)
        seconds.append(evaluation_s)
    samples = np.maximum(1, side.results("evaluate_samples"))  # 0: it evaluated nothing
    times = np.array(seconds) / samples
    evaluation_ms = 1000 * float(times.mean()) * side.validation_samples
    return f"{evaluation_ms:,.4g} ms each", times


def _by_steps(a: Side, b: Side) -> Finding:
    """Compares the training of runs without repeats, by their steps."""
    windows_a = _windows_of(a)
    windows_b = _windows_of(b)
    rate_a = _rate(a, _mean_rate(windows_a))
    rate_b = _rate(b, _mean_rate(windows_b))
    interval = stats.ratio_of_windows(windows_a, windows_b)
    if interval is None:
        counts = f"{windows_a.shape[1]} and {windows_b.shape[1]} windows"
        verdict = (
            f"cannot tell: too few steps ({counts} of them; {stats.LEAST_WINDOWS} are needed: "
            "lower --log-every, or more steps)"
        )
        return Finding("training", rate_a, rate_b, verdict)
    # Neighbouring windows are slow together: see `stats.ratio_of_windows`.
    method = "t-interval over steps, as many as are independent"
    verdict = verdict_of_speed(*interval)
    return Finding("training", rate_a, rate_b, verdict, method, *interval)


def _windows_of(side: Side) -> Array:
    """Returns the windows of all runs of a side, see `windows`."""
    windows_of_runs = [windows(run) for run in side.runs]
    # Axis 1 is that of the windows: two repeats follow each other as one longer run.
    return np.concatenate(windows_of_runs, axis=1)


def _mean_rate(windows: Array) -> float:
    """Returns samples a second over all windows; NaN where there are none."""
    steps, sample_s = windows
    seconds = float((steps * sample_s).sum())
    return float(steps.sum()) / seconds if seconds else math.nan


def _rate(side: Side, rate: float) -> str:
    if math.isnan(rate):
        return "-"
    step_ms = 1000 * side.mean("global_batch_size") / rate
    return f"{rate:,.4g} samples/s, {step_ms:,.4g} ms a step"


def verdict_of_speed(ratio: float, low: float, high: float) -> str:
    """Describes an interval of the speed of B over that of A."""
    if low - 1 > stats.ALIKE:
        return f"B is {ratio:.2f} x faster (95 %: {low:.2f} to {high:.2f})"
    if 1 - high > stats.ALIKE:
        # How many times slower is the inverse, and inverted, the ends change places.
        slower = 1 / ratio
        least = 1 / high
        most = 1 / low
        return f"B is {slower:.2f} x slower (95 %: {least:.2f} to {most:.2f})"
    return f"no difference beyond noise ({low:.2f} to {high:.2f})"


def _metric(name: str, a: Side, b: Side) -> Finding:
    """Compares a metric of both; without repeats, only an accuracy has an interval."""
    values_a = _metric_values(name, a)
    values_b = _metric_values(name, b)
    mean_a = float(values_a.mean())
    mean_b = float(values_b.mean())
    texts = (number(mean_a), number(mean_b))
    if not math.isfinite(mean_a) or not math.isfinite(mean_b):
        return Finding(name, *texts, "cannot tell: it is not a number in some run")
    if _has_repeats(a, b):
        # A difference, not a ratio: a metric may be 0 or negative.
        interval = stats.difference_of_repeats(values_a, values_b)
        verdict = verdict_of_metric(*interval)
        return Finding(name, *texts, verdict, _BY_REPEATS, *interval)
    # An accuracy is a share of right answers, and so has a binomial interval; of a program of the
    # user's own, neither that nor the number of its samples is known.
    are_shares = 0 <= mean_a <= 1 and 0 <= mean_b <= 1
    if "accuracy" not in name or not are_shares or _has_own_program(a, b):
        return Finding(name, *texts, _TOO_FEW)
    # The interval counts answers: of an evaluation without any there is none.
    split = "validation"
    if name.startswith("test_"):
        split = "test"
    samples_a = _samples_of(split, a)
    samples_b = _samples_of(split, b)
    if min(samples_a, samples_b) < 1:
        return Finding(name, *texts, _TOO_FEW)
    low, high = stats.difference_of_shares(mean_a, samples_a, mean_b, samples_b)
    interval = (mean_b - mean_a, low, high)
    method = (
        f"binomial intervals, for {samples_a:,} and {samples_b:,} {split} samples; not for repeats "
        "with other seeds"
    )
    verdict = verdict_of_metric(*interval)
    return Finding(name, *texts, verdict, method, *interval)


def _samples_of(split: str, side: Side) -> int:
    """Returns the samples of a split, validation or test, that one evaluation is of."""
    if split == "test":
        return round(side.test_samples)
    return round(side.validation_samples)


def _metric_values(name: str, side: Side) -> Array:
    """Returns a metric of each run, shape (repeats,); NaN where it is no number."""
    numbers = []
    for metrics in side.results("metrics"):
        # What is not finite is null in JSON: as NaN it keeps its place among the repeats.
        measurement = decode_or_none(metrics.get(name), NullIsNaN)
        if measurement is None:
            measurement = math.nan
        numbers.append(float(measurement))
    return np.array(numbers)


def verdict_of_metric(difference: float, low: float, high: float) -> str:
    """Describes an interval of the metric of B minus that of A."""
    if low > stats.ALIKE:
        return f"B is higher by {difference:.4f} (95 %: {low:.4f} to {high:.4f})"
    if high < -stats.ALIKE:
        # "lower by" takes a positive number, and negated, the ends change places.
        decrease = -difference
        least = -high
        most = -low
        return f"B is lower by {decrease:.4f} (95 %: {least:.4f} to {most:.4f})"
    return f"no difference beyond noise ({low:+.4f} to {high:+.4f})"


def windows(run: MeasuredRun) -> Array:
    """Returns the windows of a run's steps, in order, without warm-up; see
    `stats.ratio_of_windows`. Steps that were repeated after a restart count once, the last time.
    """
    measured: list[tuple[int, int, float]] = []  # last step, steps, samples/s
    steps = 0
    for record in run.records(Record):
        if isinstance(record, Start):
            steps = 0  # the steps since the last window were lost with the attempt
        if not isinstance(record, Step):
            continue
        # After a restart from a checkpoint, steps are repeated: the last time counts.
        while measured and measured[-1][0] >= record.step:
            measured.pop()
        steps += record.steps
        rate = record.samples_per_s or 0
        if rate > 0:  # without a rate, the steps count to the next window
            measured.append((record.step, steps, rate))
            steps = 0
    first = math.ceil(_WARM_UP * len(measured))
    counts = []
    sample_s = []
    for _, step_count, rate in measured[first:]:
        counts.append(step_count)
        sample_s.append(1 / rate)
    return np.array([counts, sample_s], dtype=np.float64)
