"""Records in words, whatever of them is there."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.core.run_records import record_of
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
