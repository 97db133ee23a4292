"""Emotion (dair-ai/emotion): six emotions of short English texts."""

from __future__ import annotations

from slurmft.data import label_ids
from slurmft.tasks.pretrained import Rows
from slurmft.tasks.texts import Texts

LABELS = ["sadness", "joy", "love", "anger", "fear", "surprise"]


class Task(Texts):
    """One of six classes for a text."""

    def label_names(self, train: Rows) -> list[str]:
        return LABELS

    def labels(self, rows: Rows, names: list[str]) -> list[int]:
        assert self.config.label_column is not None  # from the recipe
        return label_ids(rows.column(self.config.label_column), names, rows.where)
