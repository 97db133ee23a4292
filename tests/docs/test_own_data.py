"""The rows that docs/own-data.md shows, checked as `slurmft submit` checks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from slurmft.train.task_facts import TASKS
from tests.docs import pages

PAGE = next(text for path, text in pages.PAGES.items() if path.name == "own-data.md")
SHOWN = re.findall(
    r"^`--task ([\w-]+)`:(?:(?!^`--task).)*?```jsonl\n(.*?)```", PAGE, re.M | re.S
)
OWN = {
    "multi-label",
    "text-regression",
    "token-classification",
    "seq2seq",
    "embeddings",
    "reranker",
}


def test_each_kind_of_data_is_shown() -> None:
    assert {task for task, _ in SHOWN} == OWN
    assert set(TASKS) > OWN


@pytest.mark.parametrize(("task", "rows"), SHOWN, ids=[task for task, _ in SHOWN])
def test_rows(task: str, rows: str, tmp_path: Path, tiny_model: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    config = TrainConfig.resolve(task=task, data=str(tmp_path), model=str(tiny_model))
    found = inputs.check(localize(config))
    assert found[str(tmp_path / "train.jsonl")]["what"].startswith(
        f"{rows.count(chr(10))} rows"
    )
