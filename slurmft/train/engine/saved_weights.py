"""The weights of a model in the type in which they are saved."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmft.core.files import write_text

SAVED_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Value of --save-dtype -> type."""


def save_whole(
    model: Any,
    folder: Path,
    weights: dict[str, Tensor] | None,
    dtype: torch.dtype,
) -> None:
    """Writes a model as transformers loads it.

    Args:
        weights: its weights; None: those that it has.
        dtype: type in which they are saved.
    """
    if dtype is not torch.float32:
        weights = rounded(weights or model.state_dict(), dtype)
    model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    if dtype is not torch.float32:
        _write_dtype(folder / "config.json", dtype)


def rounded(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns weights in another type. What shared memory does so again, and is saved once."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    rounded_weights = {}
    for name, weight in weights.items():
        if weight.is_floating_point():
            place = (weight.data_ptr(), weight.shape)
            weight = copies.setdefault(place, weight.to(dtype))
        rounded_weights[name] = weight
    return rounded_weights


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    """Puts the type of the saved weights into a model's configuration, which has that of the model
    in memory."""
    values = json.loads(config.read_text(encoding="utf-8"))
    for key in values.keys() & {"dtype", "torch_dtype"}:
        values[key] = str(dtype).removeprefix("torch.")
    # Not `write_json`, which has no infinity: some configurations hold one.
    write_text(config, json.dumps(values, indent=2) + "\n")
