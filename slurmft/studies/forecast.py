"""Forecasts of measured values: what the scaling model hands to reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slurmft.runs.scan import MeasuredRun
from slurmft.studies.published import PublishedTable


@dataclass(frozen=True, slots=True)
class Forecast:
    """A measured value, and what the model predicts that was fitted without it."""

    measured: float
    median: float
    low: float
    high: float
    """The true value lies between low and high with a probability of 90 %."""
    devices: int
    fitted: tuple[int, ...]
    """The numbers of devices of the rows that the model was fitted to, ascending."""

    @property
    def error_percent(self) -> float:
        """How far the prediction is from the measured value."""
        return 100 * (self.median / self.measured - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measured value lies in the interval."""
        return self.low <= self.measured <= self.high


Forecasts = Sequence[Forecast | None]
"""One for every row of a table; None: too few rows have fewer devices."""


class Forecaster(Protocol):
    """The module `scaling.backtest`. It imports numpy, so it is passed in where it is asked for."""

    def of_runs(
        self, groups: Sequence[tuple[Sequence[MeasuredRun], float | None]], title: str
    ) -> Forecasts:
        """Forecasts of training times: of the repeats of a cell, with their measured time."""

    def of_table(self, table: PublishedTable) -> Forecasts:
        """Forecasts of the rows of a published table."""

    def network_gbit_s(self, table: PublishedTable) -> float | None:
        """The line rate between nodes that the forecasts of a table took as given."""
