"""Texts, or pairs of texts, of the user's own, with the classes that are found in them."""

from __future__ import annotations

from slurmft.data import label_ids, label_names
from slurmft.tasks.pretrained import Rows
from slurmft.tasks.texts import Texts


class Task(Texts):
    """One of the classes that the training split has."""

    metric_names = ("accuracy", "f1_macro")

    def label_names(self, train: Rows) -> list[str]:
        """The names that the data set has for its classes, else the labels themselves."""
        return train.names.get(self._label_column) or label_names(
            train.column(self._label_column), train.where
        )

    def labels(self, rows: Rows, names: list[str]) -> list[int]:
        column, values = self._label_column, rows.column(self._label_column)
        return label_ids(values, names, rows.where, by_number=column in rows.names)

    @property
    def _label_column(self) -> str:
        assert self.config.label_column is not None  # from the recipe
        return self.config.label_column
