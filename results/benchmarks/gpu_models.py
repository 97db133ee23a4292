"""What gpu.py trains: random weights, generated texts; nothing is fetched. Tasks of one's own, as
users write them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from slurmft.train.data.tables import offsets_of
from slurmft.train.tasks import TaskFacts, TokenData, TokenTable
from slurmft.train.tasks.synthetic import PRESETS, Preset, Task

SIZES = {"whole": PRESETS["paper"], "tiny": PRESETS["quick"]}


class DistilBert(Task):
    """DistilBERT-base on texts as long as those of the emotion data set: 22 tokens in the mean."""

    facts = TaskFacts(splits=(), defaults={"model": None})

    @dataclasses.dataclass
    class Options:
        size: str = "whole"
        """tiny: of what runs on a CPU, to try a benchmark out."""

    @property
    def preset(self) -> Preset:
        return SIZES[self.options.size]


class DistilBert128(DistilBert):
    """The same on texts of 128 tokens: each as long as it goes, from the others' tokens."""

    def prepare(self) -> TokenData:
        data = super().prepare()
        train, validation = map(_of_128, (data.train, data.validation))
        return dataclasses.replace(data, train=train, validation=validation)


def _of_128(table: TokenTable) -> TokenTable:
    count = len(table.tokens) // 128
    lengths = np.full(count, 128)
    return TokenTable(
        table.tokens[: count * 128], offsets_of(lengths), table.labels[:count]
    )


class ModernBert(DistilBert):
    """ModernBERT-base: 22 layers, rotary positions, windows of attention."""

    def model(self, data: TokenData) -> Any:
        from transformers import ModernBertConfig, ModernBertForSequenceClassification

        tiny = {
            "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
            "num_attention_heads": 2, "vocab_size": 8192,
        }  # fmt: skip
        sizes = tiny if self.options.size == "tiny" else {}
        config = ModernBertConfig(
            num_labels=len(data.labels), pad_token_id=data.pad_id, **sizes
        )
        return ModernBertForSequenceClassification(config)
