"""What transformers' Trainer is given to train as slurmft does: the model and the samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)


def classifier(model: Path) -> Any:
    """Returns the classifier of emotions that a run with --dropout 0 begins with."""
    set_seed(42)
    return AutoModelForSequenceClassification.from_pretrained(
        model,
        num_labels=6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )


def samples(model: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the samples of rows, each a sample of its own."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [{**tokenizer(row["text"]), "labels": row["label"]} for row in rows]


def training_rows(data: Path) -> list[dict[str, Any]]:
    """Returns the rows of the training data, in the order of the file."""
    with open(data / "train.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
