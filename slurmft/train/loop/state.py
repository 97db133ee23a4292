"""Parts of a run's state: its position, predictions, random generators, the optimizer's state."""

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slurmft.train.loop.checkpoint import Tensors

Groups = list[dict[str, Any]]
"""Settings of an optimizer, by the groups of its weights."""


@dataclass(slots=True)
class Position:
    """How far a run has come: all that decides what it does next."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs whose training is done."""
    batch: int = 0
    """Optimizer steps done in the current epoch."""
    phase: str = "train"
    """train, evaluate (after an epoch), done; test (once, after all that)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    by_class: dict[str, Any] = field(default_factory=dict)
    """Of the same, see `Task.by_class`."""
    test: dict[str, float] = field(default_factory=dict)
    """Metrics of the test split, of the model that is saved."""
    best: float | None = None
    """Best value of the task's first metric."""
    best_checkpoint: str | None = None
    since_best: int = 0
    """Evaluations since that one."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of a part of the validation split."""

    samples: np.ndarray
    """int64, (n,): indices into the split, without repetition."""
    values: Any
    """int64 or float64, (n, ...): an array; or a tensor, where nobody has waited for the device."""

    @classmethod
    def union(cls, parts: Sequence["Predicted"]) -> "Predicted":
        """All parts, sorted by sample; what several have is taken once."""
        nothing = np.empty(0, dtype=np.int64)
        # Empty parts of a resumed training know neither type nor shape of what is to come.
        filled = [p for p in parts if len(p.samples)] or [cls(nothing, nothing)]
        samples, first = np.unique(np.concatenate([p.samples for p in filled]), return_index=True)
        values = [torch.as_tensor(p.values).cpu().numpy() for p in filled]
        return cls(samples, np.concatenate(values)[first])

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> "Predicted":
        return cls(tensors["samples"].numpy(), tensors["values"].numpy())

    def tensors(self) -> Tensors:
        return {"samples": torch.from_numpy(self.samples), "values": torch.as_tensor(self.values)}


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator of this rank, as JSON can hold it."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    state = {
        "python": [version, _encode(np.asarray(words, dtype=np.uint64)), gauss],
        "numpy": [legacy[0], _encode(legacy[1]), *legacy[2:]],
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if device.type != "cpu":
        own = torch.get_device_module(device).get_rng_state(device)
        state[device.type] = _encode(own.numpy())
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every random generator as it was."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(w) for w in _decode(words, np.uint64)), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _decode(keys, np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
    if device.type in state:
        own = torch.from_numpy(_decode(state[device.type], np.uint8))
        torch.get_device_module(device).set_rng_state(own, device)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Tensors, Groups]:
    """An optimizer's state, which is of tensors alone, by "parameter.name"; and its settings."""
    whole = optimizer.state_dict()
    state = ((i, name, t) for i, own in whole["state"].items() for name, t in own.items())
    return {f"{i}.{name}": t for i, name, t in state}, whole["param_groups"]


def join_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors, groups: Groups) -> None:
    """Puts a state that `split_optimizer` took apart back into an optimizer."""
    state: dict[int, Tensors] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
