"""`slurmft plan`: how many nodes a run should have, from runs that were measured."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmft.core.errors import UsageError, unknown
from slurmft.core.filesystem import absolute
from slurmft.core.text import aligned
from slurmft.runs import resolve, scan
from slurmft.studies.scaling import model
from slurmft.studies.scaling.model import MAX_DEVICES, Array, Fit, Interval, Prediction, Workload
from slurmft.studies.scaling.series import Series, published, series_of

_EFFICIENT = 0.7
_SURELY = 0.9
"""The probability with which a deadline counts as met."""


@dataclass(frozen=True, slots=True)
class Option:
    """A number of nodes, and what it would give."""

    prediction: Prediction
    speedup_draws: Array
    """Over one node, shape (draws,)."""
    is_extrapolated: bool
    """It has more devices than any measured run."""

    @property
    def nodes(self) -> int:
        return self.prediction.nodes

    @property
    def time_s(self) -> Interval:
        return self.prediction.total_s

    @property
    def speedup(self) -> Interval:
        return Interval.of(self.speedup_draws)

    @property
    def efficiency(self) -> Interval:
        return Interval.of(self.speedup_draws / self.nodes)

    @property
    def node_hours(self) -> Interval:
        return Interval.of(self.prediction.draws_s * self.nodes / 3600)

    @property
    def device_hours(self) -> Interval:
        return Interval.of(self.prediction.draws_s * self.prediction.devices / 3600)

    def meets(self, deadline_s: float) -> float:
        """The probability of ending in time."""
        return float((self.prediction.draws_s <= deadline_s).mean())

    def stays_within(self, node_hours: float) -> float:
        """The probability of costing no more."""
        return float((self.prediction.draws_s * self.nodes / 3600 <= node_hours).mean())

    @property
    def shares(self) -> dict[str, float]:
        """What the time is spent on -> its share; they add up to 1."""
        of = self.prediction
        found = {name: of.share(draws) for name, draws in of.train_parts_s.items()}
        for name, phases in _SHARED.items():
            covered = [of.phases_s[p] for p in phases if p in of.phases_s]
            if covered:
                found[name] = sum(of.share(draws) for draws in covered)
        return found


_SHARED = {
    "evaluation": ("evaluate",),
    "metric": ("metric", "broadcast"),
    "startup": ("startup",),
    "rest": ("rest",),
}
"""Shares besides those of training -> the phases that they sum up."""

_HELPS = {
    "computing": "computing itself: faster devices, or --precision bf16 where they compute it",
    "starting": "fixed costs of each step: a larger --batch-size makes fewer steps",
    "waiting": "waiting for gradients and the slowest device: a larger --batch-size, "
    "--gradient-accumulation-steps, or a faster network",
    "evaluation": "evaluation: a larger --eval-batch-size, a smaller validation split, or fewer "
    "epochs",
    "metric": "metrics: --metric-gather memory, whose cost does not grow with the ranks",
    "startup": "start-up, which no number of nodes shortens: longer runs, or local copies of model "
    "and data",
    "rest": "saving and what is between phases, which no number of nodes shortens",
}
"""Share -> what it is, and what would make it smaller."""


# --- from sources to predictions ------------------------------------------------------------------


def read(sources: Sequence[str]) -> dict[str, Series]:
    """Name -> series of all sources.

    Raises:
        UsageError: they hold no finished run; or a table that is none, or is not alone.
    """
    tables = [source for source in sources if absolute(source).is_file()]
    if tables and len(sources) > 1:
        raise UsageError(
            f"{tables[0]!r} is a table, and not the only source",
            "plan from one table, or from run directories",
        )
    if tables:
        return published(absolute(tables[0]))
    found, problems = scan.find([resolve.folder_of(source) for source in sources])
    for problem in problems:
        print(f"warning: left out: {problem}", file=sys.stderr)
    return series_of(found)


def choose(series: dict[str, Series], name: str | None) -> Series:
    if name is not None:
        if name not in series:
            raise unknown("--series", name, list(series))
        return series[name]
    if len(series) > 1:
        names = ", ".join(repr(n) if " " in n else n for n in series)
        raise UsageError(
            f"{len(series)} kinds of runs, of which one fit takes one",
            f"choose by --series: {names}",
        )
    return next(iter(series.values()))


def check_rows(series: Series) -> None:
    if len(series.device_counts) > 1:
        return
    count = series.device_counts[0]
    had = "one run" if len(series.rows) == 1 else f"{len(series.rows)} runs, all"
    raise UsageError(
        f"{had} on {count} device(s): how time scales shows at two counts or more",
        f"measure another: slurmft submit --nodes {2 if count == 1 else 1} with the same flags",
    )


def node_counts(text: str | None, series: Series, devices_per_node: int | None) -> list[int]:
    """The numbers of nodes that `--nodes` asks for, ascending.

    Raises:
        UsageError: it is no list or range of numbers, or a count has more than MAX_DEVICES.
    """
    each = devices_per_node or series.devices_per_node
    if text is None:
        most = max(8, 4 * max(row.nodes for row in series.rows))
        return [2**i for i in range(11) if 2**i <= most and 2**i * each <= MAX_DEVICES] or [1]
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f"--nodes {text!r} is no list of counts", "write it as 1-64 or 1,2,4")
        if last * each > MAX_DEVICES:
            raise UsageError(
                f"--nodes {text!r}: {last} nodes have {last * each:,} devices; the model ends at "
                f"{MAX_DEVICES:,}",
                f"ask for at most {MAX_DEVICES // each} nodes",
            )
        counts |= set(range(first, last + 1))
    return sorted(counts)


def devices_per_node(series: Series, arguments: argparse.Namespace) -> int:
    return int(arguments.devices_per_node or series.devices_per_node)


def workload(fit: Fit, arguments: argparse.Namespace) -> Workload:
    """What the first measured run did, with what the flags change."""
    given = {
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "kept_global_batch": arguments.global_batch,
        "micro_steps": arguments.gradient_accumulation_steps,
        "train_samples": arguments.train_samples,
        "gradient_bytes": arguments.gradient_bytes,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(fit.rows[0].work, **changes)


def predict(fit: Fit, counts: Sequence[int], work: Workload, devices_per_node: int) -> list[Option]:
    """What each number of nodes would give, against one node."""
    one = fit.predict(devices_per_node, 1, work)
    most = max(row.devices for row in fit.rows)
    found = []
    for nodes in counts:
        prediction = fit.predict(nodes * devices_per_node, nodes, work)
        speedup = one.draws_s / prediction.draws_s
        found.append(Option(prediction, speedup, prediction.devices > most))
    return found


def recommend(
    options: Sequence[Option], deadline_s: float | None, budget: float | None
) -> tuple[Option, str]:
    """The number of nodes to take, and why.

    Args:
        options: of ascending numbers of nodes.
        deadline_s: the time to end in, if there is one.
        budget: node-hours to spend, if they are limited.

    Raises:
        UsageError: no option meets the deadline, or stays within the budget.
    """
    affordable = [o for o in options if budget is None or o.node_hours.median <= budget]
    fastest = min(affordable or options, key=lambda o: o.time_s.median)
    if not affordable:
        cheapest = min(options, key=lambda o: o.node_hours.median)
        raise UsageError(
            f"--budget {budget:g} node-hours is below one run: the cheapest, on {cheapest.nodes} "
            f"node(s), takes {cheapest.node_hours.median:.3g}",
            "give more, or shorten the run: --epochs",
        )
    if deadline_s is not None:
        return _in_time(affordable, deadline_s, fastest)
    if budget is not None:
        within = fastest.stays_within(budget)
        return fastest, (
            f"the fastest of these within {budget:g} node-hours "
            f"({fastest.node_hours.median:.3g}; probability {_percent(within)})"
        )
    efficient = [o for o in options if o.efficiency.median >= _EFFICIENT]
    if not efficient:
        return options[0], f"none of these has an efficiency of {_EFFICIENT} or more"
    return efficient[-1], (
        f"the most of these with an efficiency of {_EFFICIENT} or more; "
        "--deadline or --budget ask for something else"
    )


def _in_time(options: Sequence[Option], deadline_s: float, fastest: Option) -> tuple[Option, str]:
    asked = f"--deadline {amount(deadline_s)}"
    for surely in (_SURELY, 0.5):
        for option in options:
            if (chance := option.meets(deadline_s)) >= surely:
                text = f"the fewest of these that end within {amount(deadline_s)}"
                doubt = "" if surely == _SURELY else ": not sure"
                return option, f"{text} (probability {_percent(chance)}{doubt})"
    best = fastest.time_s
    raise UsageError(
        f"{asked} is not met by any of these: the fastest, {fastest.nodes} node(s), takes "
        f"{_amounts(best)}",
        "give more time, other --nodes, or less to do: --epochs",
    )


# --- output ---------------------------------------------------------------------------------------


def amount(seconds: float) -> str:
    """Three digits and a unit: 0.52 s, 16.7 s, 12.3 min, 4.31 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds)} s"


def _amounts(of: Interval) -> str:
    """As `amount`, of all three in the median's unit."""
    unit = amount(of.median).split()[1]
    return f"{_range(of, {'s': 1, 'min': 60, 'h': 3600}[unit])} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(chance: float) -> str:
    """Draws cannot tell more than 99 % from certainty."""
    return ">99%" if chance > 0.99 else f"{chance:.0%}"


def _range(of: Interval, scale: float = 1) -> str:
    low, high = _digits(of.low / scale), _digits(of.high / scale)
    median = _digits(of.median / scale)
    return median if low == high else f"{median} ({low} to {high})"


def describe(
    series: Series, fit: Fit, options: Sequence[Option], chosen: Option, why: str
) -> list[str]:
    """The whole plan, as lines."""
    counts = ", ".join(str(n) for n in series.device_counts)
    lines = [
        f"{series.name}: {len(series.rows)} run(s) on {counts} devices; "
        f"{options[0].prediction.devices // options[0].nodes} device(s) a node",
        _planned(options[0].prediction.work),
        *(f"note: {note}" for note in series.notes),
        *_left_out(fit),
        "",
        *table(options),
        "",
        *share_table(options),
        "",
        *_warnings(series, options, chosen),
        f"bottleneck on {chosen.nodes} node(s): {bottleneck(chosen)}",
        f"recommended: {chosen.nodes} node(s){', extrapolated' if chosen.is_extrapolated else ''}: "
        f"{why}",
    ]
    return lines


def _planned(work: Workload) -> str:
    """What would run: where the measured runs did different work, that of the first."""
    batch = (
        f"{work.kept_global_batch:,} in all"
        if work.kept_global_batch
        else f"{work.batch_size:,} a device"
    )
    micro_steps = f" x {work.micro_steps} micro-steps" if work.micro_steps > 1 else ""
    return (
        f"planned: {work.train_samples:,} samples x {work.epochs} epoch(s), batch {batch}"
        f"{micro_steps}, {work.evaluate_samples:,} samples an evaluation"
    )


def _left_out(fit: Fit) -> list[str]:
    missing = [phase for phase in model.PHASES if phase not in fit.covered]
    return [f"not measured, so not in any time below: {', '.join(missing)}"] if missing else []


def table(options: Sequence[Option]) -> list[str]:
    """Time and cost by number of nodes: medians, with what holds 90 %."""
    unit, scale = _unit(options)
    titles = ("nodes", "devices", f"time, {unit}", "speedup", "efficiency", "node-hours")
    rows = [titles + (("device-hours", "") if _several(options) else ("",))]
    for option in options:
        cells = [
            str(option.nodes),
            str(option.prediction.devices),
            _range(option.time_s, scale),
            _range(option.speedup),
            _range(option.efficiency),
            _range(option.node_hours),
            *([_range(option.device_hours)] if _several(options) else []),
            "extrapolated" if option.is_extrapolated else "",
        ]
        rows.append(tuple(cells))
    return aligned(rows)


def _several(options: Sequence[Option]) -> bool:
    """Whether a node has several devices, so that their hours are not the nodes'."""
    return options[0].prediction.devices > options[0].nodes


def _unit(options: Sequence[Option]) -> tuple[str, float]:
    least = min(option.time_s.median for option in options)
    units = (("h", 3600.0), ("min", 60.0))
    return next((u for u in units if least >= 2 * u[1]), ("s", 1.0))


def share_table(options: Sequence[Option]) -> list[str]:
    """What the time is spent on, and the optimizer steps, by number of nodes."""
    names = list(options[0].shares)
    rows = [("nodes", *names, "global batch", "steps")]
    for option in options:
        shares = [f"{option.shares[name]:.0%}" for name in names]
        sizes = (f"{_global_batch(option):,}", f"{_steps(option):,}")
        rows.append((str(option.nodes), *shares, *sizes))
    return aligned(rows)


def bottleneck(option: Option) -> str:
    """What takes the most time besides computing, and what would help."""
    shares = option.shares
    others = {name: share for name, share in shares.items() if name != "computing"}
    if not others or shares.get("computing", 0) > 0.9:
        return f"{shares['computing']:.0%} is {_HELPS['computing']}"
    worst = max(others, key=lambda name: others[name])
    return f"after computing, {others[worst]:.0%} is {_HELPS[worst]}"


def _warnings(series: Series, options: Sequence[Option], chosen: Option) -> list[str]:
    lines = []
    if any(option.is_extrapolated for option in options):
        most = series.device_counts[-1]
        lines.append(f"extrapolated: no run had more than {most} devices; measure before you rely")
    smallest = min(row.work.global_batch_size(row.devices) for row in series.rows)
    growing = [o for o in (chosen, options[-1]) if _global_batch(o) > smallest]
    if growing:
        told = growing[0]
        lines.append(
            f"accuracy: on {told.nodes} node(s) the global batch grows to {_global_batch(told):,} "
            f"({smallest:,} in the smallest run) and leaves {_steps(told):,} optimizer steps; "
            "accuracy may fall "
            f"({_accuracy_seen(series)}). --global-batch keeps it, and makes speedups smaller"
        )
    return lines


def _global_batch(option: Option) -> int:
    return option.prediction.work.global_batch_size(option.prediction.devices)


def _steps(option: Option) -> int:
    return option.prediction.work.steps(option.prediction.devices)


def _accuracy_seen(series: Series) -> str:
    """What a growing global batch did to the first metric: in these runs, or as published."""
    found = [
        (row.work.steps(row.devices), series.metrics[row.label])
        for row in series.rows
        if row.label in series.metrics
    ]
    if len({steps for steps, _ in found}) < 2:
        return "published for emotion: 0.9375 with 315 steps, 0.56 with 20"
    (fewest, low), (most, high) = min(found), max(found)
    return f"these runs: {high:.4g} with {most:,} steps, {low:.4g} with {fewest:,}"


def as_json(series: Series, options: Sequence[Option], chosen: Option, why: str) -> dict[str, Any]:
    """The whole plan, for programs."""
    return {
        "series": series.name,
        "rows": [
            {"label": r.label, "devices": r.devices, "nodes": r.nodes, "seconds": dict(r.seconds)}
            for r in series.rows
        ],
        "planned": dataclasses.asdict(options[0].prediction.work),
        "notes": list(series.notes),
        "interval": 0.9,
        "counts": [
            {
                "nodes": o.nodes,
                "devices": o.prediction.devices,
                "extrapolated": o.is_extrapolated,
                "time_s": dataclasses.asdict(o.time_s),
                "speedup": dataclasses.asdict(o.speedup),
                "efficiency": dataclasses.asdict(o.efficiency),
                "node_hours": dataclasses.asdict(o.node_hours),
                "device_hours": dataclasses.asdict(o.device_hours),
                "shares": o.shares,
                "global_batch_size": _global_batch(o),
                "steps": _steps(o),
            }
            for o in options
        ],
        "bottleneck": bottleneck(chosen),
        "warnings": _warnings(series, options, chosen),
        "recommended": {"nodes": chosen.nodes, "why": why},
    }
