"""How far is the scaling model from published rows that it has not seen?

    python results/benchmarks/planner_errors.py            # some minutes
    python results/benchmarks/planner_errors.py RUN|DIR... # of your own runs

Every series is fitted on its rows of 1, 2 and 4 devices (of Xeon nodes 1 and 2), and predicts the
others. Besides: every row left out in turn, and the rows with other seeds.

Of your own runs, each that has two smaller numbers of devices in its series is predicted from runs
on these.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from harness import PUBLISHED, parser, save

from slurmft.core.errors import UsageError
from slurmft.plugins.studies.scaling import model
from slurmft.plugins.studies.scaling.model import Fit, Row
from slurmft.plugins.studies.scaling.series import Series, series_of
from slurmft.runs import resolve, scan
from tests.support.published_series import phase_s, published_series

FITTED_DEVICES = {
    "mn4_emotion": 4,
    "mn4_benchmark": 4,
    "icelake_glue": 2,
    "sapphire_rapids_squad": 1,
}
"""Table -> the most devices of a row that the fit is given."""

SEEDS = range(2)


def main() -> None:
    found: dict[str, Any] = {}
    for table, most in FITTED_DEVICES.items():
        for name, series in published_series(PUBLISHED / f"{table}.json").items():
            found[f"{table}: {name}"] = examine(series, most)
            print_series(f"{table}: {name}", found[f"{table}: {name}"])
    summary = summarize(found)
    print(*(f"{k}: {v}" for k, v in summary.items()), sep="\n")
    save("planner_errors", {"summary": summary, "series": found})


def examine(series: Series, most: int) -> dict[str, Any]:
    """All predictions of one series."""
    fitted = [row for row in series.rows if row.devices <= most]
    fits = [model.fit(fitted, seed) for seed in SEEDS]
    rows = []
    for row in series.rows:
        found = [facts(fit, row, row not in fitted) for fit in fits]
        errors = [each["error"] for each in found]
        rows.append(found[0] | {"error_of_seeds": [min(errors), max(errors)]})
    return {
        "fitted_rows": len(fitted),
        "rows": rows,
        "left_out": left_out(series),
    }


def facts(fit: Fit, row: Row, is_held_out: bool) -> dict[str, Any]:
    """One row: measured, predicted, 90 % interval, error (predicted / measured - 1)."""
    phase, measured = next(iter(row.seconds.items()))
    interval = phase_s(fit.predict(row.devices, row.nodes, row.work), phase)
    return {
        "row": row.label,
        "devices": row.devices,
        "phase": phase,
        "held_out": is_held_out,
        "measured_s": measured,
        "predicted_s": interval.median,
        "low_s": interval.low,
        "high_s": interval.high,
        "error": round(interval.median / measured - 1, 4),
        "in_interval": interval.low <= measured <= interval.high,
    }


def left_out(series: Series) -> list[dict[str, Any]]:
    """Each row, predicted from all others; nothing where only one other is left."""
    if len(series.rows) < 3:
        return []
    return [
        facts(model.fit([r for r in series.rows if r is not row]), row, True)
        for row in series.rows
    ]


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Errors and coverage, over kinds of tables."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for name, series in found.items():
        table, _, rest = name.partition(": ")
        kind = (
            f"{table}, {rest.partition('-')[0]}" if table == "mn4_benchmark" else table
        )
        kinds.setdefault(kind, []).extend(r for r in series["rows"] if r["held_out"])
    everything = [row for rows in kinds.values() for row in rows]
    left = [row for series in found.values() for row in series["left_out"]]
    return {
        "held_out": {kind: summary_of(rows) for kind, rows in kinds.items() if rows},
        "all_held_out": summary_of(everything),
        "each_left_out": summary_of(left),
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": len(rows),
        "mean_error": round(statistics.mean(errors), 4),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": max(errors),
        "within_10_percent": sum(e <= 0.1 for e in errors),
        "in_90_percent_interval": sum(row["in_interval"] for row in rows),
    }


def print_series(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name} (fitted on {found['fitted_rows']} rows)")
    for row in found["rows"]:
        kind = "held out" if row["held_out"] else "fitted"
        inside = "" if row["in_interval"] else "  OUTSIDE"
        low, high = row["error_of_seeds"]
        print(
            f"  {row['row']:<20} {kind:<8}  measured {row['measured_s']:10.4g} s  predicted "
            f"{row['predicted_s']:10.4g} ({row['low_s']:.4g} to {row['high_s']:.4g})  "
            f"{row['error']:+.1%} (seeds {low:+.1%} to {high:+.1%}){inside}",
            flush=True,
        )


def of_runs(sources: Sequence[str]) -> None:
    """Prints how well the training of runs is predicted from runs on fewer devices."""
    runs, problems = scan.find([resolve.folder_of(source) for source in sources])
    print(*(f"left out: {problem}" for problem in problems), sep="\n", end="")
    for name, series in series_of(runs).items():
        found = backtest(series)
        print(
            f"{name}:"
            if found
            else f"{name}: no run has two smaller numbers of devices"
        )
        for each in found:
            print(
                f"  {each['row']:<20} {each['devices']} devices  measured {each['measured_s']:.4g} "
                f"s  predicted {each['predicted_s']:.4g} ({each['low_s']:.4g} to "
                f"{each['high_s']:.4g})  {each['error']:+.1%}  from {each['fitted_devices']}"
            )


def backtest(series: Series) -> list[dict[str, Any]]:
    """Predicts every run that has two smaller numbers of devices in its series."""
    counts, found = series.device_counts, []
    for i, devices in enumerate(counts[2:], start=2):
        fit = model.fit([r for r in series.rows if r.devices < devices])
        for row in (r for r in series.rows if r.devices == devices):
            training = dataclasses.replace(row, seconds={"train": row.seconds["train"]})
            found.append(facts(fit, training, True) | {"fitted_devices": counts[:i]})
    return found


if __name__ == "__main__":
    command = parser(__doc__)
    command.add_argument("runs", nargs="*", metavar="RUN|DIR", help="runs of your own")
    if sources := command.parse_args().runs:
        try:
            of_runs(sources)
        except UsageError as error:
            raise SystemExit(f"error: {error}") from None
    else:
        main()
