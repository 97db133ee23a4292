"""Predicts measured runs from runs with fewer devices: a backtest of the scaling model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmft.core.text import aligned
from slurmft.studies.scaling import model
from slurmft.studies.scaling.model import Interval
from slurmft.studies.scaling.planner import digits, ranged, unit_of
from slurmft.studies.scaling.series import Series


@dataclass(frozen=True, slots=True)
class Backtest:
    """A measured run, and what a fit to the runs with fewer devices predicts of it."""

    label: str
    devices: int
    measured_s: float
    """Of its training."""
    predicted_s: Interval
    error: float
    """Predicted / measured - 1."""
    fitted_devices: list[int]


def backtest(series: Series, network_gbit_s: float | None) -> list[Backtest]:
    """Predicts every run that has two smaller numbers of devices in its series. A fit takes about
    a second; runs on the same number of devices share it."""
    counts, found = series.device_counts, []
    for i, devices in enumerate(counts[2:], start=2):
        fit = model.fit([r for r in series.rows if r.devices < devices], network_gbit_s)
        for row in (r for r in series.rows if r.devices == devices):
            predicted = fit.predict(devices, row.nodes, row.work).phase_s("train")
            measured_s = row.seconds["train"]
            error = predicted.median / measured_s - 1
            found.append(Backtest(row.label, devices, measured_s, predicted, error, counts[:i]))
    return found


def describe_backtest(found: Sequence[Backtest]) -> list[str]:
    """The backtest, as lines."""
    if not found:
        return ["backtest: no run has two smaller numbers of devices in its series"]
    rows = [["measured run", "devices", "measured", "predicted", "error", "from devices"]]
    for each in found:
        unit, scale = unit_of(each.measured_s)
        rows.append(
            [
                each.label,
                str(each.devices),
                f"{digits(each.measured_s / scale)} {unit}",
                f"{ranged(each.predicted_s, scale)} {unit}",
                f"{each.error:+.1%}",
                ", ".join(map(str, each.fitted_devices)),
            ]
        )
    inside = sum(each.predicted_s.holds(each.measured_s) for each in found)
    return [
        "backtest: the training of measured runs, predicted from those with fewer devices",
        *aligned(rows),
        f"{inside} of {len(found)} measured values lie in their 90 % interval",
    ]
