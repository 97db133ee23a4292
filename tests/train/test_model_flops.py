"""Floating-point operations of a model, against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from slurmft.train.engine.model_flops import ModelFlops

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}
BERT = BertConfig(num_attention_heads=2, num_labels=1, **SMALL)
LLAMA = LlamaConfig(num_attention_heads=2, **SMALL)
DISTILBERT = DistilBertConfig(
    dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=50
)


@pytest.mark.parametrize(
    ("model", "causal"),
    [
        (BertForTokenClassification(BERT), False),
        (DistilBertForSequenceClassification(DISTILBERT), False),
        (LlamaForCausalLM(LLAMA), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_operations_of_a_step(model: Any, causal: bool) -> None:
    """torch counts attention whole also where half of it is masked, and the heads."""
    model.config._attn_implementation = "eager"
    flops, batch, length = ModelFlops.of(model), 3, 16
    tokens = torch.randint(5, 50, (batch, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens)[0].sum().backward()
    whole = flops.per_token * tokens.numel()
    whole += flops.per_pair * (2 if causal else 1) * batch * length**2
    # The first layer's states need no gradient of the embeddings' indices: all but that is there.
    assert counter.get_total_flops() == pytest.approx(whole, rel=0.05)
    assert flops.of_batch(torch.full((batch,), length)) <= whole


def test_frozen_weights_take_two_thirds() -> None:
    model = BertForTokenClassification(BERT)
    whole = ModelFlops.of(model).per_token
    model.requires_grad_(False)
    assert ModelFlops.of(model).per_token == pytest.approx(2 / 3 * whole)
