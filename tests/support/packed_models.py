"""Small models of each family that packs, and batches for them: packed, and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.engine import packing
from slurmft.train.engine.packing import Form
from slurmft.train.tasks.base import set_dropout

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "num_labels": 3,
}  # fmt: skip
DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "DebertaV2": {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
        "position_biased_input": False, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "type_vocab_size": 0,
    },
    "DistilBert": DISTIL,
    "EuroBert": {
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3,
    },
    "Gemma2": DECODER | SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
    "Gemma3Text": DECODER | SLIDING | {"query_pre_attn_scalar": 8},
    "GPT2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 60,
    },
    "Llama": DECODER,
    "Mistral": DECODER | {"sliding_window": 6},
    "ModernBert": {
        "global_attn_every_n_layers": 2, "local_attention": 8, "classifier_pooling": "mean",
    },
    "Qwen2": DECODER,
    "Qwen3": DECODER,
}  # fmt: skip
ENCODERS = [
    "Bert", "Camembert", "DistilBert", "Electra", "EuroBert", "Gte", "MPNet",
    "ModernBert", "NomicBert", "Roberta", "XLMRoberta", "DebertaV2",
]  # fmt: skip
MEANS = {"EuroBert", "ModernBert"}
"""Families whose classifiers take the mean of all tokens here."""
FUSED = {"Bert", "Camembert", "DistilBert", "Electra", "Roberta", "XLMRoberta"}
DECODERS = ["GPT2", "Gemma2", "Gemma3Text", "Llama", "Mistral", "Qwen2", "Qwen3"]
LENGTHS = [5, 12, 1, 12, 7, 3, 9, 2, 12]
CPU = torch.device("cpu")


def make(name: str, head: str = "ForSequenceClassification", **more: Any) -> Any:
    """A small model of random weights, without dropout."""
    sizes = DISTIL | {"num_labels": 3} if name == "DistilBert" else SIZES
    config = getattr(transformers, f"{name}Config")(
        **(sizes | FAMILIES.get(name, {}) | more)
    )
    set_dropout(config, 0.0)
    config.pad_token_id = 1 if "oberta" in name or name == "MPNet" else 0
    torch.manual_seed(0)
    if name == "Gemma3Text" and head == "ForCausalLM":
        name = "Gemma3"
    if name == "GPT2" and head == "ForCausalLM":
        head = "LMHeadModel"
    return getattr(transformers, f"{name}{head}")(config)


def pack(model: Any, fuse: bool = False, form: Form = Form.FIRST) -> packing.Packing:
    packed = packing.pack(model, fuse)
    assert isinstance(packed, packing.Packing), packed
    assert bool(packed.layers) == fuse
    assert packed.form is form
    return packed


def table(model: Any, lengths: list[int]) -> TokenTable:
    draw = np.random.default_rng(1)
    samples = [draw.integers(3, 60, length) for length in lengths]
    return TokenTable.build(samples, [i % 3 for i in range(len(lengths))])


def batch(model: Any, lengths: list[int], width: int = 0) -> Batch:
    """The padded one, its samples sorted by length as the packed one's are."""
    texts = table(model, lengths)
    order = texts.packed(np.arange(len(lengths))).indices
    return texts.batch(order, model.config.pad_token_id, least=width)


def announced(
    packed: packing.Packing, lengths: list[int], device: torch.device = CPU
) -> Batch:
    """The packed batch that the model gets next."""
    batch = table(packed.model, lengths).packed(np.arange(len(lengths)))
    packed.expect(batch.lengths, device)
    return batch
