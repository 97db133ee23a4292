"""Columns, rows and notes for what the scaling model predicts of measured rows."""

from __future__ import annotations

from collections.abc import Callable

from slurmft.studies.forecast import Forecast, Forecasts
from slurmft.studies.report.formats import NOTHING, Column, Columns, Value, decimals_of


def columns(label: str, forecasts: Forecasts) -> Columns:
    """The prediction with its interval, and its error, for people; none without a forecast."""
    if not any(forecasts):
        return []
    return [
        (Column("predicted", label), with_intervals(forecasts)),
        (Column("predicted_error_percent", "error (%)"), [error_of(f) for f in forecasts]),
    ]


def data_columns(key: str, forecasts: Forecasts) -> Columns:
    """The same for CSV, with the ends of the interval and the devices of the fit."""
    if not any(forecasts):
        return []
    parts: dict[str, Callable[[Forecast], float | str]] = {
        key: lambda f: f.median,
        f"{key}_low": lambda f: f.low,
        f"{key}_high": lambda f: f.high,
        "predicted_error_percent": lambda f: f.error_percent,
        "predicted_from_devices": lambda f: " ".join(map(str, f.fitted)),
    }
    return [
        (Column(name), [Value.of(part(f) if f else None) for f in forecasts])
        for name, part in parts.items()
    ]


def with_intervals(forecasts: Forecasts) -> list[Value]:
    """9.7 (9.1-10.3)"""
    decimals = decimals_of(f.median for f in forecasts if f)

    def text(f: Forecast) -> str:
        return f"{f.median:.{decimals}f} ({f.low:.{decimals}f}-{f.high:.{decimals}f})"

    return [Value(f.median, text(f)) if f else Value(None, NOTHING) for f in forecasts]


def error_of(forecast: Forecast | None) -> Value:
    if forecast is None:
        return Value(None, NOTHING)
    return Value(forecast.error_percent, f"{forecast.error_percent:+.1f}")


def notes(forecasts: Forecasts, network_gbit_s: float | None = None) -> list[str]:
    """What was fitted to what, and how often the intervals were right."""
    made = [f for f in forecasts if f]
    if not made:
        return ["no predictions: no row has two smaller numbers of devices in its series"]
    fits = {f.devices: f.fitted for f in sorted(made, key=lambda f: f.devices)}
    parts = [f"{devices} from {', '.join(map(str, fitted))}" for devices, fitted in fits.items()]
    network = f"; line rate between nodes {network_gbit_s:g} Gbit/s" if network_gbit_s else ""
    return [
        "predicted: by the model of slurmft plan, fitted for every row on all rows of its series "
        f"with fewer devices ({'; '.join(parts)} devices){network}; in brackets the 90 % interval; "
        "error: predicted / measured - 1",
        f"{sum(f.is_inside for f in made)} of {len(made)} measured values lie in their 90 % "
        "interval",
    ]
