"""Models are evaluated and tried out without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import slurmft
from slurmft.train.engine import own_loss, packing
from slurmft.train.engine.evaluating import evaluating


def test_what_a_model_notes_in_evaluation_is_forgotten() -> None:
    """As the capacity of NLLB-MoE's routers, which leave out the tokens above it."""
    config = transformers.NllbMoeConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_experts=2,
        expert_capacity=64, encoder_sparse_step=1, decoder_sparse_step=1, pad_token_id=1,
        decoder_start_token_id=2,
    )  # fmt: skip
    model = transformers.NllbMoeForConditionalGeneration(config).train()
    model.lm_head.eval()
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad(), evaluating(model):
        assert not model.training
        model(input_ids=ids, labels=ids)
    routers = [m for m in model.modules() if hasattr(m, "expert_capacity")]
    assert [router.expert_capacity for router in routers] == [64, 64]
    assert model.training
    assert not model.lm_head.training
    table: Any = type("Table", (), {"tokens": np.arange(4, 9)})
    table.extra = {"target_tokens": table.tokens}
    own_loss.remark(model, type("Data", (), {"train": table})())
    assert [router.expert_capacity for router in routers] == [64, 64]
    assert "cannot work without padding" in str(packing.pack(model, False, 8))


def test_outputs_of_as_many_classes_as_tokens() -> None:
    """Are those of texts; outputs of tokens have a place each, padded or packed."""
    is_token = torch.tensor([[True, True, False], [True, True, True]])
    classes = torch.arange(6.0).view(2, 3)
    assert packing.without_padding("logits", classes, is_token) is classes
    starts = packing.without_padding("start_logits", classes, is_token)
    assert starts.tolist() == [0, 1, 3, 4, 5]
    states = torch.arange(10.0).view(1, 5, 2)
    found = packing.without_padding("last_hidden_state", states, is_token)
    assert found.shape == (5, 2)


def test_no_other_module_has_a_model_in_evaluation_mode() -> None:
    folder = Path(slurmft.__file__).parent
    allowed = {
        "train/engine/evaluating.py",
        "train/loop/saved_model.py",  # a model of its own, which nobody trains
    }
    modules = set()
    for path in folder.rglob("*.py"):
        if ".eval()" in path.read_text() or ".train(False)" in path.read_text():
            modules.add(str(path.relative_to(folder)))
    assert modules == allowed
