"""Packed batches of each family of models, and the padded ones of transformers.

The outputs and the gradients of all weights are compared, relative to the largest; the padded batch
is wider than its longest text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparisons.table import Row, check


@check("batches", 1e-5)
def packed(_: Path) -> Iterator[Row]:
    from tests.support.packed_models import DECODERS, ENCODERS, FUSED

    heads = dict.fromkeys(ENCODERS, "ForTokenClassification")
    heads |= dict.fromkeys(DECODERS, "ForCausalLM")
    for name, head in heads.items():
        classes = of_model(name, "ForSequenceClassification")
        tokens = of_model(name, head)
        what = "tokens" if name in ENCODERS else "language modelling"
        layers = ", fused layers" if name in FUSED else ""
        check = f"{name}, classes and {what}{layers}: outputs and gradients, relative"
        yield Row(check, "transformers, padded", max(classes, tokens))


def of_model(name: str, head: str) -> float:
    """Returns the largest difference of outputs and gradients."""
    import torch

    from slurmft.train.engine import packing
    from tests.support.packed_models import FUSED, LENGTHS, announced, batch, make

    padded = make(name, head)
    bare = copy.deepcopy(padded)
    packed = packing.pack(bare, fuse=name in FUSED)
    assert isinstance(packed, packing.Packing), packed
    inputs = batch(padded, LENGTHS, width=20).inputs
    expected = padded(**inputs).logits
    if expected.dim() == 3:
        # Of the real tokens, one after another, as packed models compute them.
        expected = expected[inputs["attention_mask"].bool()][None]
    outputs = bare(**announced(packed, LENGTHS).inputs).logits
    assert outputs.shape == expected.shape
    for logits in (expected, outputs):
        torch.autograd.backward(logits.square().mean())
    gradients = [gradients_of(model) for model in (bare, padded)]
    return max(relative(outputs, expected), relative(*gradients))


def gradients_of(model: Any) -> Any:
    """Returns the gradients of all weights in one row; those that the loss does not use have 0."""
    import torch

    gradients = []
    for weight in model.parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        gradients.append(gradient.flatten())
    return torch.cat(gradients)


def relative(values: Any, expected: Any) -> float:
    """Returns the largest difference over the largest value."""
    difference = (values - expected).detach().abs().max()
    return float(difference / expected.detach().abs().max())
