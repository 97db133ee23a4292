"""The saved model beside the one that was trained: the outputs of both for some validation samples.

Whoever uses a run's model loads its files by transformers. Whatever computes otherwise here (packed
batches, layers of our own, a trimmed vocabulary) must not make another model of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmft.core.errors import one_line
from slurmft.node import hardware
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.setup import Setup

_OUTPUTS = ("logits", "start_logits", "end_logits")
_ROUNDING = 1e-3
"""Largest difference that is rounding, relative to the largest output."""
_COARSE_ROUNDING = 0.05
"""That of weights that are saved in 16 bits, or of another device's arithmetic."""
_MOST_TOKENS = 32
"""Tokens of a sample of a language model: logits of a vocabulary are large."""
_LARGEST_SHARE = 0.25
"""Share of a node's memory that the second model may take."""


def compare(setup: Setup, loaded: LoadedModel) -> dict[str, Any] | None:
    """Compares the saved model, as transformers loads it, with the trained one; a warning where
    they differ. On the main rank, which has the whole model.

    Returns:
        Number of samples, and the largest difference of outputs; None: they were not compared.
    """
    folder = setup.run_dir.model
    model_class = type(loaded.model)
    is_whole = (folder / "config.json").is_file()  # and no adapter
    if not is_whole or not hasattr(model_class, "from_pretrained"):
        return None
    size_mib = loaded.parameters * 4 / 2**20
    if size_mib > _LARGEST_SHARE * hardware.memory_mib(Path("/")):
        setup.job.say(
            "the saved model is not compared: a second one needs too much memory"
        )
        return None
    try:
        return _compare(setup, loaded, model_class)
    except Exception as error:  # whatever it is: the run has its model
        setup.job.warn(f"the saved model could not be compared: {one_line(error)}")
        return None


@torch.no_grad()
def _compare(setup: Setup, loaded: LoadedModel, model_class: Any) -> dict[str, Any]:
    table = setup.data.validation
    samples = table.few_samples()
    of_tokens = table.token_labels is not None
    if of_tokens:  # each has its logits: some are enough
        table = table.few(_MOST_TOKENS)
        samples = np.arange(len(table))
    model = loaded.model
    was_training = model.training
    model.eval()
    batch = loaded.batch(table, samples)
    padded = loaded.padded(table, samples)
    if loaded.packing:  # whose samples are sorted
        padded = loaded.padded(table, batch.indices)
    mask = padded.inputs["attention_mask"]
    # Packed batches have none; --batching padded has more padding.
    trained_mask = batch.inputs.get("attention_mask", mask)
    if (
        not of_tokens
    ):  # samples may have targets that the model takes, as those of a decoder
        batch = setup.task.batch(batch, table)
        padded = setup.task.batch(padded, table)
    # In fp32: Accelerate's wrapper would let it compute in the run's precision.
    forward = getattr(model, "_original_forward", model)
    trained = forward(**loaded.sent(batch, table).inputs)
    model.train(was_training)
    plain_model = model_class.from_pretrained(
        setup.run_dir.model,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
    )
    saved = plain_model.eval()(**padded.inputs)
    difference = 0.0
    largest = 1.0
    for name in _OUTPUTS:
        if name not in saved:
            continue
        expected = saved[name]
        output = trained[name].float().cpu()
        is_of_samples = name == "logits" and expected.ndim == 2
        if not is_of_samples and "decoder_input_ids" not in padded.inputs:
            expected = _of_tokens(expected, mask)
            output = _of_tokens(output, trained_mask)
        difference = max(difference, float((output - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    limit = _ROUNDING
    on_cpu = setup.world.device.type == "cpu"
    if not on_cpu or loaded.save_dtype() is not torch.float32:
        limit = _COARSE_ROUNDING
    if not difference <= limit * largest:  # NaN is no agreement
        setup.job.warn(
            f"the saved model gives other outputs than the trained one: for {len(samples)} "
            f"validation samples they differ by {difference:.2g}"
        )
    return {"samples": len(samples), "largest_difference": difference}


def _of_tokens(output: Tensor, mask: Tensor) -> Tensor:
    """Returns the outputs of tokens, one after another.

    Args:
        mask: 1 at the places of a padded batch that hold a token: (batch, width).
    """
    if output.shape[:2] == mask.shape:
        return output[mask.bool()]
    return output[0]  # packed: (1, tokens, ...)
