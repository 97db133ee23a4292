"""Predictions of an evaluation that is under way, as checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slurmft.checkpoint import Tensors


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of a part of the validation split."""

    samples: np.ndarray
    """int64, (n,): indices into the split, without repetition."""
    values: np.ndarray
    """int64 or float64, (n, ...)."""

    @classmethod
    def union(cls, parts: list[Predicted]) -> Predicted:
        """All parts, sorted by sample; what several have is taken once."""
        nothing = np.empty(0, dtype=np.int64)
        # Empty parts of a resumed training know neither type nor shape of what is to come.
        filled = [p for p in parts if len(p.samples)] or [cls(nothing, nothing)]
        samples, first = np.unique(np.concatenate([p.samples for p in filled]), return_index=True)
        return cls(samples, np.concatenate([p.values for p in filled])[first])

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Predicted:
        return cls(tensors["samples"].numpy(), tensors["values"].numpy())

    def tensors(self) -> Tensors:
        return {"samples": torch.from_numpy(self.samples), "values": torch.from_numpy(self.values)}
