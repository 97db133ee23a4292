"""The loss that a language model of transformers computes itself, as their Trainer minimises it.

Most have the cross entropy of the tokens, which is what is trained here. ProphetNet's is of further
tokens as well; models of experts may add one of their routers.
"""

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slurmft.train.data.token_data import TokenData
from slurmft.train.engine.evaluating import evaluating

_TOKENS = 8
"""Tokens of the text that a model is tried out with."""
_ROUNDING = 1e-5
"""Largest difference of two losses that is rounding, relative to the larger one."""


def remark(model: Any, data: TokenData) -> str | None:
    """Returns what to say of a language model whose own loss is another than the cross entropy of
    the tokens; None: it is this one, or the model has none."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return None
    losses = None
    # Whatever a model cannot do with a text alone, the training does or refuses by itself.
    with contextlib.suppress(Exception):
        losses = _losses(model, data)
    if losses is None:
        return None
    own, of_tokens = losses
    if abs(own - of_tokens) <= _ROUNDING * max(abs(own), abs(of_tokens)):
        return None
    return (
        f"{type(model).__name__} computes a loss of its own, which transformers' Trainer "
        f"minimises: {own:.5g} for some tokens, whose cross entropy is {of_tokens:.5g}; the cross "
        "entropy is trained here"
    )


@torch.no_grad()
def _losses(model: Any, data: TokenData) -> tuple[float, float] | None:
    """Returns the loss that a model computes of a text's first tokens, and their cross entropy."""
    table = data.train
    ids = _tokens(table.tokens, model)
    labels = ids
    is_encoder_decoder = model.config.is_encoder_decoder
    if is_encoder_decoder:
        labels = _tokens(table.extra["target_tokens"], model)
    with evaluating(model):
        # A copy: some models write into their labels.
        output = model(input_ids=ids, labels=labels.clone())
    if output.loss is None:
        return None
    logits = output.logits.float()
    if not is_encoder_decoder:  # each token tells the next one
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    return float(output.loss), float(expected)


def _tokens(tokens: np.ndarray, model: Any) -> Tensor:
    """Returns the first tokens of a table as a batch of one text: (1, tokens)."""
    first = np.asarray(tokens[:_TOKENS], dtype=np.int64)
    return torch.from_numpy(first)[None].to(model.device)
