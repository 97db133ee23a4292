"""Plans a run: time and cost by number of nodes, from a fit to measured runs."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmft.core.errors import UsageError, unknown
from slurmft.core.text import aligned
from slurmft.plugins.studies.scaling import model
from slurmft.plugins.studies.scaling.model import (
    MAX_DEVICES,
    Array,
    Fit,
    Interval,
    Prediction,
    Workload,
)
from slurmft.plugins.studies.scaling.series import Series

_EFFICIENT = 0.7
_SURELY = 0.9
"""The probability from which a deadline counts as met."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A number of nodes with its predicted time and cost."""

    nodes: int
    devices: int
    extrapolated: bool
    """Whether it has more devices than any measured run."""
    time_s: Interval
    speedup: Interval
    """Over one node."""
    efficiency: Interval
    node_hours: Interval
    shares: dict[str, float]
    """Part of the time -> its share; they add up to 1."""
    global_batch_size: int
    steps: int
    draws_s: Array
    """Of the time, shape (draws,)."""


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
"""Share -> what it is, and what would reduce it."""


def choose_series(series: dict[str, Series], name: str | None) -> Series:
    """The series of a name, or the only one."""
    if name is not None and name not in series:
        raise unknown("--series", name, list(series))
    if name is None and len(series) > 1:
        names = ", ".join(repr(n) if " " in n else n for n in series)
        raise UsageError(
            f"the sources hold {len(series)} kinds of runs, and a plan is for one",
            f"choose one with --series: {names}",
        )
    chosen = series[name] if name else next(iter(series.values()))
    if len(chosen.device_counts) == 1:
        count = chosen.device_counts[0]
        runs = "one run" if len(chosen.rows) == 1 else f"{len(chosen.rows)} runs, all"
        raise UsageError(
            f"{runs} on {count} device(s): a plan needs runs on two numbers of devices or more",
            f"measure another: slurmft submit --nodes {2 if count == 1 else 1} with the same flags",
        )
    return chosen


def node_counts(text: str | None, series: Series, devices_per_node: int) -> list[int]:
    """The numbers of nodes that `--nodes` asks for, ascending."""
    if text is None:
        most = max(8, 4 * max(row.nodes for row in series.rows))
        most = min(most, MAX_DEVICES // devices_per_node)
        return [2**i for i in range(11) if 2**i <= most] or [1]
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(
                f"--nodes {text!r} is not a list of counts", "write it as 1-64 or 1,2,4"
            )
        if last * devices_per_node > MAX_DEVICES:
            raise UsageError(
                f"--nodes {text!r}: {last} nodes have {last * devices_per_node:,} devices; the "
                f"model ends at {MAX_DEVICES:,}",
                f"ask for at most {MAX_DEVICES // devices_per_node} nodes",
            )
        counts |= set(range(first, last + 1))
    return sorted(counts)


def predict(fit: Fit, counts: Sequence[int], work: Workload, devices_per_node: int) -> list[Option]:
    """The options, with their speedup over one node."""
    one = fit.predict(devices_per_node, 1, work)
    most, found = max(row.devices for row in fit.rows), []
    for nodes in counts:
        devices = nodes * devices_per_node
        prediction = fit.predict(devices, nodes, work)
        speedup = one.draws_s / prediction.draws_s
        found.append(
            Option(
                nodes=nodes,
                devices=devices,
                extrapolated=devices > most,
                time_s=prediction.total_s,
                speedup=Interval.of(speedup),
                efficiency=Interval.of(speedup / nodes),
                node_hours=Interval.of(prediction.draws_s * nodes / 3600),
                shares=_shares(prediction),
                global_batch_size=work.global_batch_size(devices),
                steps=work.steps(devices),
                draws_s=prediction.draws_s,
            )
        )
    return found


def _shares(prediction: Prediction) -> dict[str, float]:
    parts, phases = dict(prediction.train_parts_s), prediction.phases_s
    for phase in ("evaluate", "metric", "broadcast", "startup", "rest"):
        if phase in phases:
            name = {"evaluate": "evaluation", "broadcast": "metric"}.get(phase, phase)
            parts[name] = parts.get(name, 0) + phases[phase]
    return {name: float(np.mean(s / sum(phases.values()))) for name, s in parts.items()}


def recommend(options: Sequence[Option], deadline_s: float | None) -> tuple[Option, str]:
    """The number of nodes to take, and why; the options have ascending numbers."""
    if deadline_s is None:
        efficient = [o for o in options if o.efficiency.median >= _EFFICIENT]
        if not efficient:
            return options[0], f"none of these has an efficiency of {_EFFICIENT} or more"
        why = f"the most of these with an efficiency of {_EFFICIENT} or more"
        return efficient[-1], f"{why}; --deadline sets a time"
    unit, scale = unit_of(deadline_s)
    limit = f"{digits(deadline_s / scale)} {unit}"
    for least, doubt in ((_SURELY, ""), (0.5, ": not sure")):
        for option in options:
            if (chance := float((option.draws_s <= deadline_s).mean())) >= least:
                # The draws do not resolve more than 99 %.
                probability = ">99%" if chance > 0.99 else f"{chance:.0%}"
                text = f"the fewest of these that end within {limit}"
                return option, f"{text} (probability {probability}{doubt})"
    fastest = min(options, key=lambda o: o.time_s.median)
    unit, scale = unit_of(fastest.time_s.median)
    raise UsageError(
        f"--deadline {limit} is not met by any of these: the fastest, {fastest.nodes} node(s), "
        f"takes {ranged(fastest.time_s, scale)} {unit}",
        "allow more time, or give other --nodes or fewer --epochs",
    )


# --- output ---------------------------------------------------------------------------------------


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit that a time is shown in, and its seconds."""
    units = (("h", 3600.0), ("min", 60.0))
    return next((u for u in units if seconds >= 2 * u[1]), ("s", 1.0))


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ranged(of: Interval, scale: float = 1) -> str:
    low, median, high = (digits(value / scale) for value in (of.low, of.median, of.high))
    return median if low == high else f"{median} ({low} to {high})"


def describe_plan(
    series: Series, fit: Fit, work: Workload, options: Sequence[Option], chosen: Option, why: str
) -> list[str]:
    """The whole plan, as lines."""
    counts = ", ".join(str(n) for n in series.device_counts)
    extrapolated = ", extrapolated" if chosen.extrapolated else ""
    kept = work.kept_global_batch
    batch = f"{kept:,} in all" if kept else f"{work.batch_size:,} a device"
    batch += f" x {work.micro_steps} micro-steps" if work.micro_steps > 1 else ""
    missing = [phase for phase in model.PHASES if phase not in fit.covered]
    return [
        f"{series.name}: {len(series.rows)} run(s) on {counts} devices; "
        f"{options[0].devices // options[0].nodes} device(s) a node",
        f"planned: {work.train_samples:,} samples x {work.epochs} epoch(s), batch {batch}, "
        f"{work.evaluate_samples:,} samples an evaluation",
        *(f"note: {note}" for note in series.notes),
        *([f"not measured, so not in any time below: {', '.join(missing)}"] if missing else []),
        "",
        *_time_table(options),
        "",
        *_share_table(options, work),
        "",
        *_warnings(series, options, chosen),
        f"bottleneck on {chosen.nodes} node(s): {bottleneck(chosen)}",
        f"recommended: {chosen.nodes} node(s){extrapolated}: {why}",
    ]


def _time_table(options: Sequence[Option]) -> list[str]:
    unit, scale = unit_of(min(o.time_s.median for o in options))
    rows = [["nodes", "devices", f"time, {unit}", "speedup", "efficiency", "node-hours", ""]]
    for o in options:
        costs = (ranged(of) for of in (o.speedup, o.efficiency, o.node_hours))
        times = (str(o.nodes), str(o.devices), ranged(o.time_s, scale))
        rows.append([*times, *costs, "extrapolated" if o.extrapolated else ""])
    return aligned(rows)


def _share_table(options: Sequence[Option], work: Workload) -> list[str]:
    samples = work.train_samples * work.epochs
    tokens = {"tokens/s": samples * work.tokens_per_sample} if work.tokens_per_sample else {}
    rates = {"samples/s": samples} | tokens
    rows = [["nodes", *options[0].shares, "global batch", "steps", *rates]]
    for o in options:
        shares = (f"{share:.0%}" for share in o.shares.values())
        training_s = o.time_s.median * sum(o.shares.get(p, 0) for p in model.TRAIN_PARTS)
        shown = (f"{number / training_s:,.0f}" for number in rates.values())
        rows.append([str(o.nodes), *shares, f"{o.global_batch_size:,}", f"{o.steps:,}", *shown])
    return aligned(rows)


def bottleneck(option: Option) -> str:
    """The largest share of the time besides computing, and what would reduce it."""
    others = dict(option.shares)
    if (computing := others.pop("computing", 0)) > 0.9 or not others:
        return f"{computing:.0%} is {_HELPS['computing']}"
    worst = max(others, key=lambda name: others[name])
    return f"after computing, {others[worst]:.0%} is {_HELPS[worst]}"


def _warnings(series: Series, options: Sequence[Option], chosen: Option) -> Iterator[str]:
    if any(option.extrapolated for option in options):
        most = series.device_counts[-1]
        yield (f"extrapolated: no run had more than {most} devices; measure before you rely on it")
    smallest = min(row.work.global_batch_size(row.devices) for row in series.rows)
    if growing := [o for o in (chosen, options[-1]) if o.global_batch_size > smallest]:
        first = growing[0]
        yield (
            f"accuracy: on {first.nodes} node(s) the global batch grows to "
            f"{first.global_batch_size:,} ({smallest:,} in the smallest run) and leaves "
            f"{first.steps:,} optimizer steps; accuracy may fall "
            "(published for emotion: 0.9375 with 315 steps, 0.56 with 20; yours: slurmft report). "
            "--global-batch keeps it, with smaller speedups"
        )


def as_json(
    series: Series, work: Workload, options: Sequence[Option], chosen: Option, why: str
) -> dict[str, Any]:
    """The whole plan, for programs."""
    counts = [dataclasses.asdict(option) for option in options]
    return {
        "series": series.name,
        "rows": [dataclasses.asdict(row) for row in series.rows],
        "planned": dataclasses.asdict(work),
        "notes": list(series.notes),
        "interval": 0.9,
        "counts": [{k: v for k, v in each.items() if k != "draws_s"} for each in counts],
        "bottleneck": bottleneck(chosen),
        "warnings": list(_warnings(series, options, chosen)),
        "recommended": {"nodes": chosen.nodes, "why": why},
    }
