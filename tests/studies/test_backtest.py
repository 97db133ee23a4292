"""Predictions of published tables from rows with fewer devices."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path

import pytest

from slurmft.studies import published
from slurmft.studies.report import layouts
from slurmft.studies.report.formats import (
    as_csv,
    as_text,
)
from slurmft.studies.report.sections import of_published
from slurmft.studies.scaling import backtest, model
from tests.support import CHECKOUT

PUBLISHED = CHECKOUT / "results" / "published"


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits that are fast, and less exact."""
    monkeypatch.setattr(model, "DRAWS", 40)


def test_predictions_are_tables_of_their_own_form() -> None:
    """Charts of throughput get rows of predicted throughput; a speedup is no time."""
    speedups, rates = (
        next(t for t in published.load(PUBLISHED / "mn4_benchmark.json") if t.part == part)
        for part in ("train_speedup_published_text", "train_samples_per_s_per_gpu")
    )
    assert backtest.of_table(speedups) == [None]
    one = dataclasses.replace(rates, rows=rates.rows[-5:])  # fp16-256
    found = backtest.of_table(one)
    assert [f and f.fitted for f in found] == [None, None, (1, 2), (1, 2, 4), (1, 2, 4, 8)]
    assert all(f.low < f.median < f.high and abs(f.error_percent) < 10 for f in found if f)
    lines = as_text(layouts.layout(one, found)).splitlines()
    (theirs,) = (line for line in lines if " published" in line)
    assert theirs.split() == ["fp16-256", "published", "1364", "1301", "1209", "1124", "1011"]
    assert re.search(r" predicted +n/a +n/a +1\d{3} \(1\d{3}-1\d{3}\) ", "\n".join(lines))
    rows = list(csv.DictReader(io.StringIO(as_csv(layouts.data(one, found)))))
    assert [r["predicted_from_devices"] for r in rows] == ["", "", "1 2", "1 2 4", "1 2 4 8"]
    assert float(rows[4]["train_samples_per_s_per_gpu"]) == 1011


@pytest.mark.usefixtures("few_draws")
def test_published_rows_are_predicted_from_fewer_devices() -> None:
    (table,) = published.load(PUBLISHED / "mn4_emotion.json")
    section = of_published([table], backtest)
    (shown,) = section.tables
    heads = [column.words for column in shown.columns]
    assert heads[4:6] == ["predicted time (s)", "error (%)"]
    texts = [row[4].text for row in shown.rows]
    assert texts[:2] == ["n/a", "n/a"]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+-[\d.]+\)", text) for text in texts[2:])
    assert (
        "8 from 1, 2, 4; 16 from 1, 2, 4, 8 devices); line rate between nodes 100 Gbit/s"
        in (shown.notes[0])
    )
    chart = next(c for c in section.charts if c.key == "time_s predicted")
    assert [s.label for s in chart.series] == ["256", "128", "256, predicted", "128, predicted"]
    assert chart.series[3].x == [8, 16]


def test_files_that_the_model_does_not_know_are_shown_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"columns": ["gpus", "hours"], "rows": [[1, 8], [2, 5], [4, 3]]}')
    section = of_published(published.load(file), backtest)
    assert section.problems == ["no predictions for x: 'x' holds no table of measured runs"]
    assert [row[1].text for row in section.tables[0].rows] == ["8", "5", "3"]
