"""What is said of language models that transformers trains by another loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slurmft.train.data.tables import TokenTable
from slurmft.train.engine import own_loss
from slurmft.train.predict import heads

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = SIZES | {"num_key_value_heads": 2, "num_local_experts": 2}
PROPHETNET = {
    "vocab_size": 60, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip


def data() -> Any:
    tokens = np.random.default_rng(0).integers(2, 60, 30)
    target = tokens[::-1].astype(np.int32)
    return SimpleNamespace(train=TokenTable.build([tokens], target_tokens=target))


@pytest.mark.parametrize(
    ("model_class", "settings", "is_another"),
    [
        ("LlamaForCausalLM", SIZES, False),
        ("MixtralForCausalLM", EXPERTS, False),
        ("MixtralForCausalLM", EXPERTS | {"output_router_logits": True}, True),
        ("ProphetNetForConditionalGeneration", PROPHETNET, True),
        ("T5ForConditionalGeneration", {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 48,
         "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}, False),
        ("BertForSequenceClassification", SIZES, False),
    ],
)  # fmt: skip
def test_a_loss_that_is_no_cross_entropy_of_tokens(
    model_class: str, settings: dict[str, Any], is_another: bool
) -> None:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, model_class)
    model = kind(kind.config_class(**settings)).train()
    remark = own_loss.remark(model, data())
    assert bool(remark) == is_another
    if remark:
        assert remark.startswith(model_class)
    assert model.training


def test_texts_of_different_lengths_are_continued_by_experts() -> None:
    """transformers itself fails there where the loss of the router is asked for."""
    settings = EXPERTS | {"output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    inputs = {"input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    batch: Any = SimpleNamespace(inputs=inputs, indices=[0])
    greedy = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    tokens = heads._continued(greedy, 0, model.eval(), batch, 0)
    assert tokens.shape == (2, 3)
