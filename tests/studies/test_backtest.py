"""Predictions of measured runs from runs with fewer devices: `slurmft plan --backtest`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmft.cli import plan
from slurmft.studies.scaling import model
from slurmft.studies.scaling.backtest import backtest
from tests.support import CHECKOUT
from tests.support.made_runs import write_run
from tests.support.published_series import published_series

PUBLISHED = CHECKOUT / "results" / "published"


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits that are fast, and less exact."""
    monkeypatch.setattr(model, "DRAWS", 40)


def test_published_rows_are_predicted_from_fewer_devices() -> None:
    """Charts of throughput, too: as the seconds of their phase."""
    series = published_series(PUBLISHED / "mn4_benchmark.json")["train-fp16-256"]
    found = backtest(series, series.network_gbit_s)
    assert [(t.devices, t.fitted_devices) for t in found] == [
        (4, [1, 2]), (8, [1, 2, 4]), (16, [1, 2, 4, 8]),
    ]  # fmt: skip
    assert all(abs(t.error) < 0.1 for t in found)
    assert all(t.predicted_s.low < t.predicted_s.median < t.predicted_s.high for t in found)


@pytest.mark.usefixtures("few_draws")
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
    assert plan.main([str(tmp_path), "--nodes", "1,2", "--backtest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["backtest"]
    assert {t["label"] for t in found} == {"4-1", "4-2"}
    for each in found:
        low, median, high = (each["predicted_s"][k] for k in ("low", "median", "high"))
        assert low < median < high
        assert each["error"] == pytest.approx(median / each["measured_s"] - 1)
    assert plan.main([str(tmp_path), "--nodes", "1,2", "--backtest"]) == 0
    _, lines = capsys.readouterr().out.split("backtest: the training of measured runs, predicted")
    rows = [line.split("  ") for line in lines.splitlines() if line.startswith("4-")]
    assert [row[-1].strip() for row in rows] == ["1, 2", "1, 2"]
    assert "of 2 measured values lie in their 90 % interval" in lines


@pytest.mark.usefixtures("few_draws")
def test_too_few_numbers_of_devices_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        write_run(tmp_path / str(nodes), nodes=nodes, nproc_per_node=1)
    assert plan.main([str(tmp_path), "--nodes", "1", "--backtest"]) == 0
    assert "no run has two smaller numbers of devices" in capsys.readouterr().out
