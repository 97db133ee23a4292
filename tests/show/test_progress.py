"""Records in words, whatever of them is there."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.core.run_records import record_of
from slurmft.show import run_table
from slurmft.show.progress import describe

METRICS = {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"epoch": 2.0, "loss": 0.25, "step": 9},
            "epoch 2 done: train loss 0.2500  accuracy 0.5000",
        ),
        ({"epoch": 2.0}, "epoch 2 done: accuracy 0.5000"),
        ({"step": 9}, "after step 9: accuracy 0.5000"),
        ({}, "evaluation: accuracy 0.5000"),
    ],
)
def test_evaluation(record: dict[str, Any], words: str) -> None:
    epoch = record_of({"event": "epoch", "metrics": METRICS} | record)
    assert epoch is not None
    assert describe(epoch) == words


@pytest.mark.parametrize("columns", ["60", "70", "80", "200"])
def test_runs_are_told_apart_on_every_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginnings of their names are one task and one day."""
    monkeypatch.setenv("COLUMNS", columns)
    facts = dict.fromkeys(
        (
            "user",
            "job",
            "model",
            "steps_done",
            "steps_total",
            "samples_per_s",
            "left_s",
        ),
    )
    rows: list[dict[str, Any]] = []
    for time in ("101500", "113000", "120001"):
        rows.append(
            {
                **facts,
                "name": f"text-classification-20261124-{time}-ab12",
                "task": "text-classification",
                "data": "tickets",
                "state": "finished",
                "metrics": {"accuracy": 0.8965},
                "reason": "",
                "waiting": None,
                "expected_start": None,
                "requeues": 0,
            }
        )
    _, *lines = run_table.table(rows).splitlines()
    assert len({line.split()[0] for line in lines}) == 3
    for line in lines:
        assert "accuracy 0.8965" in line
        assert len(line) <= int(columns)
