"""The files of a saved model: its weights in the type that is asked for, and how it generates."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmft.core.files import write_text
from slurmft.core.trusted import temporary_place
from slurmft.train.config import TrainConfig

SAVED_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Value of --save-dtype -> type."""


def dtype_of_saved(model: Any, config: TrainConfig) -> torch.dtype:
    """Returns the type of the saved weights of a model, as --save-dtype has it."""
    if config.save_dtype != "auto":
        return SAVED_DTYPES[config.save_dtype]
    stored_dtype = getattr(model, "stored_dtype", None)
    # auto: the type that the source has its weights in, where it is one that can be saved.
    for dtype in SAVED_DTYPES.values():
        if stored_dtype == dtype:
            return dtype
    return torch.float32


def save_whole(
    model: Any,
    folder: Path,
    weights: dict[str, Tensor] | None,
    dtype: torch.dtype,
) -> None:
    """Writes a whole model as transformers loads it.

    Args:
        model: those of its weights whose names begin as `saved_apart` says are in other files.
        weights: weights that are not those of the model itself, as of a sharded one; None: its own.
        dtype: type in which they are saved.
    """
    apart = getattr(model, "saved_apart", ())
    if apart:
        weights = weights or model.state_dict()
        weights = {
            name: weight
            for name, weight in weights.items()
            if not name.startswith(apart)
        }
    if dtype is not torch.float32:
        weights = rounded(weights or model.state_dict(), dtype)
    with saved_generation(model):
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    if dtype is not torch.float32:
        _write_dtype(folder / "config.json", dtype)


@contextlib.contextmanager
def saved_generation(model: Any) -> Iterator[Any]:
    """Gives a model the settings of generation that are saved with it: those of its base, or its
    `saved_generation_config`. Yields them; None: it does not generate."""
    evaluated_config = getattr(model, "generation_config", None)
    if evaluated_config is None:
        yield None
        return
    config = getattr(model, "saved_generation_config", evaluated_config)
    # transformers refuses to save a model with settings that it would not use, such as a
    # temperature without sampling, which published models have; but not those of a file.
    with tempfile.TemporaryDirectory(dir=temporary_place()) as folder:
        config.to_json_file(Path(folder, "generation_config.json"))
        config = type(config).from_pretrained(folder)
    model.generation_config = config
    try:
        yield config
    finally:
        model.generation_config = evaluated_config


def rounded(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns weights in another type.

    Tied weights, which share memory, share it again: transformers saves them once.
    """
    copies: dict[Any, Tensor] = {}
    rounded_weights = {}
    for name, weight in weights.items():
        if weight.is_floating_point():
            # With the strides: a matrix and its transpose may be in the same place.
            place = (weight.data_ptr(), weight.shape, weight.stride())
            if place not in copies:
                copies[place] = weight.to(dtype)
            weight = copies[place]
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
