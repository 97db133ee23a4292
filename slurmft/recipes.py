"""What each task trains by default: the torch-free half of a task, for the login node.

The compute half (rows, features, model, metric) is the module of the same name in `slurmft.tasks`.
A value here stands until a site file or a flag overrides it.
"""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "synthetic": {
        # About a minute on two CPU cores: a small DistilBERT that learns its labels.
        "quick": {
            "epochs": 3,
            "batch_size": 32,
            "eval_batch_size": 256,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.1,
        },
        # The sizes and the length distribution of the published benchmark on DistilBERT-base.
        "paper": {
            "epochs": 1,
            "batch_size": 256,
            "eval_batch_size": 2048,
            "learning_rate": 5e-4,
            "warmup_ratio": 0.1,
        },
    },
    "emotion": {
        "default": {
            "model": "distilbert-base-uncased",
            "data": "dair-ai/emotion",
            "text_column": "text",
            "label_column": "label",
            "max_length": 128,
            "epochs": 2,
            "batch_size": 64,
            "eval_batch_size": 256,
            "learning_rate": 5e-4,
            "warmup_ratio": 0.1,
        },
    },
}
"""task -> preset -> the configuration fields that it sets."""


def presets(task: str) -> list[str]:
    """Names of a task's presets, the default one first."""
    return list(RECIPES[task])
