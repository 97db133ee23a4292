"""Plans a run: time and cost by number of nodes, from a fit to measured runs."""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from slurmft.core.errors import UsageError, unknown
from slurmft.core.text import aligned, some
from slurmft.plugins.studies.scaling import model
from slurmft.plugins.studies.scaling.model import (
    MAX_DEVICES,
    Array,
    Fit,
    Interval,
    Prediction,
    Row,
    Workload,
)
from slurmft.plugins.studies.scaling.series import Series

_EFFICIENT = 0.7
"""The efficiency below which more nodes are not recommended without a deadline."""
_SURELY = 0.9
"""The probability from which a deadline counts as met."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRun:
    """A number of nodes with its predicted time and cost."""

    nodes: int
    devices: int
    extrapolated: bool
    """Whether it has more devices than any measured run."""
    time_s: Interval
    speedup: Interval
    """Relative to one node."""
    efficiency: Interval
    node_hours: Interval
    shares: dict[str, float]
    """Part of the time -> its share; they add up to 1."""
    global_batch_size: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Option(PredictedRun):
    """A number of nodes with its predicted time and cost, also as draws."""

    draws_s: Array
    """The time as draws, shape (draws,)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options for a run, and the one to take."""

    series: Series
    fit: Fit
    work: Workload
    options: Sequence[Option]
    """By number of nodes, ascending."""
    chosen: Option
    reason: str

    @property
    def notes(self) -> Iterator[str]:
        """The facts that the plan does not know, and the risks of following it."""
        largest = self.options[-1]
        for fact in self.fit.unknowns(self.work, largest.nodes):
            yield f"not known: {fact}"
        yield "not in any time: waiting in the queue"
        if any(option.extrapolated for option in self.options):
            devices = self.series.device_counts[-1]
            yield (
                f"extrapolated: no run had more than {devices} devices; measure before you rely "
                "on it"
            )
        yield from self._accuracy_note()

    def _accuracy_note(self) -> Iterator[str]:
        rows = self.series.rows
        smallest = min(row.work.global_batch_size(row.devices) for row in rows)
        # One note is enough: of the recommended number of nodes, else of the largest.
        for option in (self.chosen, self.options[-1]):
            if option.global_batch_size > smallest:
                yield (
                    f"accuracy: on {option.nodes} node(s) the global batch grows to "
                    f"{option.global_batch_size:,} ({smallest:,} in the smallest run) and leaves "
                    f"{option.steps:,} optimizer steps; accuracy may fall "
                    "(published for emotion: 0.9375 with 315 steps, 0.56 with 20; yours: slurmft "
                    "report). --global-batch keeps it, with smaller speedups"
                )
                return


_HELPS = {
    "computing": "computing itself: faster devices, or --precision bf16 where they compute it",
    "starting": "fixed costs of each step: a larger --batch-size makes fewer steps",
    "waiting": "waiting for gradients and the slowest device: a larger --batch-size, "
    "--gradient-accumulation-steps, or a faster network",
    "evaluation": "evaluation: a larger --eval-batch-size, a smaller validation split, or fewer "
    "epochs",
    "metric": "metrics, which one process computes: a smaller validation split, or fewer epochs",
    "startup": "start-up, which no number of nodes shortens: longer runs, or local copies of model "
    "and data",
    "rest": "saving and the time between phases, which no number of nodes shortens",
}
"""Part of the time -> what it is, and what would reduce it."""


def choose_series(series: dict[str, Series], name: str | None) -> Series:
    """Returns the series of a name, or the only one."""
    if name is not None and name not in series:
        raise unknown("--series", name, list(series))
    if name is None and len(series) > 1:
        # In quotes where a shell would split the name.
        names = some([shlex.quote(series_name) for series_name in series])
        raise UsageError(
            f"the sources hold {len(series)} kinds of runs, and a plan is for one",
            f"choose one with --series: {names}",
        )
    chosen = next(iter(series.values()))
    if name is not None:
        chosen = series[name]
    _check_device_counts(chosen)
    return chosen


def _check_device_counts(series: Series) -> None:
    """Raises UsageError if all runs had one number of devices: they show no scaling."""
    if len(series.device_counts) > 1:
        return
    count = series.device_counts[0]
    runs = f"{len(series.rows)} runs, all"
    if len(series.rows) == 1:
        runs = "one run"
    other = 2 if count == 1 else 1
    raise UsageError(
        f"{runs} on {count} device(s): a plan needs runs on two numbers of devices or more",
        f"measure another: slurmft submit --nodes {other} with the same flags",
    )


def node_counts(text: str | None, series: Series, devices_per_node: int) -> list[int]:
    """Returns the numbers of nodes that `--nodes` asks for, ascending.

    Args:
        text: such as "1-64" or "1,2,4"; None: powers of 2, to four times the measured nodes.
    """
    if text is None:
        return _powers_of_two(series, devices_per_node)
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        # A text that does not match fails the check of the range as well.
        first = last = 0
        if match:
            first = int(match[1])
            last = int(match[2] or match[1])
        if not 1 <= first <= last:
            problem = f"--nodes {text!r} is not a list of counts"
            raise UsageError(problem, "write it as 1-64 or 1,2,4")
        if last * devices_per_node > MAX_DEVICES:
            raise UsageError(
                f"--nodes {text!r}: {last} nodes have {last * devices_per_node:,} devices; the "
                f"model ends at {MAX_DEVICES:,}",
                f"ask for at most {MAX_DEVICES // devices_per_node} nodes",
            )
        # Parts may overlap: 1-4,2.
        counts.update(range(first, last + 1))
    return sorted(counts)


def _powers_of_two(series: Series, devices_per_node: int) -> list[int]:
    """Returns the numbers of nodes of a plan for which none were asked, ascending."""
    measured = max(row.nodes for row in series.rows)
    # 8 at least, so that a plan from runs on one node has several rows to choose from.
    most = min(max(8, 4 * measured), MAX_DEVICES // devices_per_node)
    # One node at least: speedups are relative to it, whatever the limit of the model.
    return [2**power for power in range(max(1, most).bit_length())]


def predict(
    fit: Fit,
    counts: Sequence[int],
    work: Workload,
    devices_per_node: int,
) -> list[Option]:
    """Predicts an option for every number of nodes."""
    # Also where --nodes leaves one node out: it is what speedups are relative to.
    one_node_s = fit.predict(devices_per_node, 1, work).draws_s
    most_devices = max(row.devices for row in fit.rows)
    options = []
    for nodes in counts:
        devices = nodes * devices_per_node
        prediction = fit.predict(devices, nodes, work)
        # Draw by draw: the errors that both times share cancel out.
        speedup = one_node_s / prediction.draws_s
        node_hours = prediction.draws_s * nodes / 3600
        option = Option(
            nodes=nodes,
            devices=devices,
            extrapolated=devices > most_devices,
            time_s=prediction.total_s,
            speedup=Interval.of(speedup),
            efficiency=Interval.of(speedup / nodes),
            node_hours=Interval.of(node_hours),
            shares=_shares(prediction),
            global_batch_size=work.global_batch_size(devices),
            steps=work.steps(devices),
            draws_s=prediction.draws_s,
        )
        options.append(option)
    return options


def _shares(prediction: Prediction) -> dict[str, float]:
    """Returns the parts of the time as shares of it, in the order of `_HELPS`."""
    parts_s = prediction.parts_s
    total_s = sum(parts_s.values())
    shares = {}
    for part in _HELPS:
        # What no run has measured is no part of the time.
        if part in parts_s:
            shares[part] = parts_s[part] / total_s
    return shares


def recommend(
    options: Sequence[Option], deadline_s: float | None
) -> tuple[Option, str]:
    """Returns the option to take, and the reason.

    Args:
        options: by number of nodes, ascending.

    Raises:
        UsageError: no option meets the deadline.
    """
    if deadline_s is None:
        return _most_efficient(options)
    unit, scale = unit_of(deadline_s)
    limit = f"{digits(deadline_s / scale)} {unit}"
    # More nodes that surely meet the deadline go before fewer that may.
    for least, doubt in ((_SURELY, ""), (0.5, ": not sure")):
        for option in options:
            in_time = option.draws_s <= deadline_s
            chance = float(in_time.mean())
            if chance < least:
                continue
            # The draws do not resolve more than 99 %.
            probability = ">99%" if chance > 0.99 else f"{chance:.0%}"
            text = f"the fewest of these that end within {limit}"
            return option, f"{text} (probability {probability}{doubt})"
    # A plan that misses its deadline recommends nothing, but says by how much.
    fastest = min(options, key=lambda o: o.time_s.median)
    unit, scale = unit_of(fastest.time_s.median)
    raise UsageError(
        f"--deadline {limit} is not met by any of these: the fastest, {fastest.nodes} node(s), "
        f"takes {ranged(fastest.time_s, scale)} {unit}",
        "allow more time, or give other --nodes or fewer --epochs",
    )


def _most_efficient(options: Sequence[Option]) -> tuple[Option, str]:
    # On more nodes a run ends sooner, and costs more node-hours: the last that are well used.
    efficient = [option for option in options if option.efficiency.median >= _EFFICIENT]
    if not efficient:
        return options[0], f"none of these has an efficiency of {_EFFICIENT} or more"
    reason = f"the most of these with an efficiency of {_EFFICIENT} or more"
    return efficient[-1], f"{reason}; --deadline sets a time"


# --- output ---------------------------------------------------------------------------------------


def unit_of(seconds: float) -> tuple[str, float]:
    """Returns the unit that a time is shown in, and its seconds."""
    if seconds >= 2 * 3600:
        return "h", 3600.0
    if seconds >= 2 * 60:
        return "min", 60.0
    return "s", 1.0


def digits(value: float) -> str:
    """Returns three significant digits, without an exponent."""
    # "g" would write 1234 as 1.23e+03.
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ranged(interval: Interval, scale: float = 1) -> str:
    """Returns a median with its range: "240 (205 to 275)"."""
    low = digits(interval.low / scale)
    median = digits(interval.median / scale)
    high = digits(interval.high / scale)
    # The ends are alike in three digits: a range would say nothing.
    if low == high:
        return median
    return f"{median} ({low} to {high})"


def describe(plan: Plan) -> list[str]:
    """Returns the whole plan, as lines."""
    series = plan.series
    chosen = plan.chosen
    counts = ", ".join(str(count) for count in series.device_counts)
    devices_per_node = chosen.devices // chosen.nodes
    extrapolated = ", extrapolated" if chosen.extrapolated else ""
    lines = [
        f"{series.name}: {len(series.rows)} run(s) on {counts} devices; "
        f"{devices_per_node} device(s) a node",
        _describe_work(plan.work),
    ]
    lines += [f"note: {note}" for note in series.notes]
    # Such as start-up, where all runs were restarted: the times below are too short by it.
    missing = []
    for phase in model.PHASES:
        if phase not in plan.fit.costs:
            missing.append(phase)
    if missing:
        lines.append(f"not measured, so not in any time below: {', '.join(missing)}")
    return [
        *lines,
        "",
        *_time_table(plan.options),
        "",
        *_share_table(plan.options, plan.work),
        "",
        *plan.notes,
        f"bottleneck on {chosen.nodes} node(s): {bottleneck(chosen)}",
        f"recommended: {chosen.nodes} node(s){extrapolated}: {plan.reason}",
    ]


def _describe_work(work: Workload) -> str:
    batch = f"{work.batch_size:,} a device"
    if work.kept_global_batch:
        batch = f"{work.kept_global_batch:,} in all"
    if work.accumulates:
        batch += f", {work.batch_size:,} at a time on a device"
    elif work.micro_steps > 1:
        batch += f" x {work.micro_steps} micro-steps"
    return (
        f"planned: {work.train_samples:,} samples x {work.epochs} epoch(s), batch {batch}, "
        f"{work.evaluate_samples:,} samples an evaluation"
    )


def _time_table(options: Sequence[Option]) -> list[str]:
    # One unit for all rows, so that they compare: that of the shortest time.
    shortest_s = min(option.time_s.median for option in options)
    unit, scale = unit_of(shortest_s)
    rows = [
        [
            "nodes",
            "devices",
            f"time, {unit}",
            "speedup",
            "efficiency",
            "node-hours",
            " ",
        ]
    ]
    for option in options:
        row = [
            str(option.nodes),
            str(option.devices),
            ranged(option.time_s, scale),
            ranged(option.speedup),
            ranged(option.efficiency),
            ranged(option.node_hours),
            "extrapolated" * option.extrapolated,
        ]
        rows.append(row)
    return aligned(rows)


def _share_table(options: Sequence[Option], work: Workload) -> list[str]:
    # One fit predicts all options: they have the same parts.
    rows = [["nodes", *options[0].shares, "global batch", "steps", "samples/s"]]
    # The result of a run may be without a count of tokens.
    if work.tokens_per_sample:
        rows[0].append("tokens/s")
    samples = work.train_samples * work.epochs
    for option in options:
        rate = samples / _training_s(option)
        row = [str(option.nodes)]
        row += [f"{share:.0%}" for share in option.shares.values()]
        row.append(f"{option.global_batch_size:,}")
        row.append(f"{option.steps:,}")
        row.append(f"{rate:,.0f}")
        if work.tokens_per_sample:
            token_rate = rate * work.tokens_per_sample
            row.append(f"{token_rate:,.0f}")
        rows.append(row)
    return aligned(rows)


def _training_s(option: Option) -> float:
    """Returns the time of training in that of the run, which has start-up and evaluations too."""
    # A part is missing where no run has measured its phase.
    shares = [option.shares.get(part, 0) for part in model.TRAIN_PARTS]
    share = sum(shares)
    return option.time_s.median * share


def bottleneck(option: Option) -> str:
    """Returns the largest share of the time besides computing, and what would reduce it."""
    others = dict(option.shares)
    computing = others.pop("computing", 0)
    if computing > 0.9 or not others:
        return f"{computing:.0%} is {_HELPS['computing']}"
    worst = max(others, key=lambda name: others[name])
    return f"after computing, {others[worst]:.0%} is {_HELPS[worst]}"


class Recommendation(TypedDict):
    """The number of nodes to take."""

    nodes: int
    why: str


class PlanFacts(TypedDict):
    """Predicted times and costs by number of nodes, and the runs that they are from."""

    series: str
    """The name of the series of runs."""
    rows: list[Annotated[dict[str, Any], Row]]
    planned: Annotated[dict[str, Any], Workload]
    notes: list[str]
    """What a reader should know of the runs."""
    interval: float
    """The probability that the ranges hold."""
    counts: list[Annotated[dict[str, Any], PredictedRun]]
    """By number of nodes, ascending."""
    bottleneck: str
    warnings: list[str]
    recommended: Recommendation


def as_json(plan: Plan) -> PlanFacts:
    """Returns the whole plan, for programs."""
    counts = []
    for option in plan.options:
        fields = dataclasses.asdict(option)
        # An array, which JSON has not; its quantiles are there.
        del fields["draws_s"]
        counts.append(fields)
    return PlanFacts(
        series=plan.series.name,
        rows=[dataclasses.asdict(row) for row in plan.series.rows],
        planned=dataclasses.asdict(plan.work),
        notes=list(plan.series.notes),
        interval=0.9,
        counts=counts,
        bottleneck=bottleneck(plan.chosen),
        warnings=list(plan.notes),
        recommended=Recommendation(nodes=plan.chosen.nodes, why=plan.reason),
    )
