"""Predictions of measured runs from runs with fewer devices, by results/benchmarks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from slurmft.plugins.studies.scaling.series import series_of
from slurmft.runs import scan
from tests.support import CHECKOUT
from tests.support.made_runs import write_run
from tests.support.published_series import published_series

sys.path.insert(0, str(CHECKOUT / "results" / "benchmarks"))
from planner_errors import backtest, of_runs

PUBLISHED = CHECKOUT / "results" / "published"


def test_published_rows_are_predicted_from_fewer_devices() -> None:
    """Charts of throughput, too: as the seconds of their phase."""
    series = published_series(PUBLISHED / "mn4_benchmark.json")["train-fp16-256"]
    found = backtest(series)
    assert [(t["devices"], t["fitted_devices"]) for t in found] == [
        (4, [1, 2]), (8, [1, 2, 4]), (16, [1, 2, 4, 8]),
    ]  # fmt: skip
    assert all(abs(t["error"]) < 0.1 for t in found)
    assert all(t["low_s"] < t["predicted_s"] < t["high_s"] for t in found)


def test_backtest_of_runs_is_of_their_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2, 4):
        for seed in (1, 2):
            step_s = (0.4 / nodes + 0.01) * (1 + seed / 100)
            write_run(
                tmp_path / f"{nodes}-{seed}", nodes=nodes, nproc_per_node=1, seed=seed,
                step_s=step_s, batch_size=32 // nodes, epochs=1,
            )  # fmt: skip
    (series,) = series_of(scan.find([tmp_path])[0]).values()
    found = backtest(series)
    assert {t["row"] for t in found} == {"4-1", "4-2"}
    for each in found:
        assert each["phase"] == "train"
        assert each["low_s"] < each["predicted_s"] < each["high_s"]
        assert each["error"] == pytest.approx(
            each["predicted_s"] / each["measured_s"] - 1, abs=1e-4
        )
    of_runs([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(
            [x for x in lines if re.search(r"4-[12] .* 4 devices .* from \[1, 2\]$", x)]
        )
        == 2
    )


def test_too_few_numbers_of_devices_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        write_run(tmp_path / str(nodes), nodes=nodes, nproc_per_node=1)
    of_runs([str(tmp_path)])
    assert "no run has two smaller numbers of devices" in capsys.readouterr().out
