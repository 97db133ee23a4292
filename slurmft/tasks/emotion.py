"""Emotion (dair-ai/emotion): six emotions of short English texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from slurmft.data import TokenData, TokenTable, column, label_ids, read_rows
from slurmft.errors import UsageError
from slurmft.sources import find_split, is_local
from slurmft.tasks.classification import Classification, label_maps, set_dropout

LABELS = ["sadness", "joy", "love", "anger", "fear", "surprise"]

Loaded = TypeVar("Loaded")


class Task(Classification):
    """Sequence classification of texts from a hub data set or a local folder."""

    def prepare(self) -> TokenData:
        """Reads and tokenizes both splits.

        Raises:
            UsageError: no such data or model, no such column, an empty split, a label that does
                not exist.
        """
        tokenizer = self._tokenizer()
        train, validation = (self._tokenize(tokenizer, s) for s in ("train", "validation"))
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            raise UsageError(f"the tokenizer of {self.config.model!r} has no padding token")
        return TokenData(train, validation, LABELS, pad_id)

    def _tokenize(self, tokenizer: Any, split: str) -> TokenTable:
        text, label = self.config.text_column, self.config.label_column
        assert text is not None  # both are from the recipe
        assert label is not None
        table, where = self._rows(split)
        labels = label_ids(column(table, label, where), LABELS, where)
        texts = column(table, text, where)
        for row, value in enumerate(texts, start=1):
            if not isinstance(value, str):
                raise UsageError(f"{where!r}: row {row} has the text {value!r}, which is no string")
        assert self.config.max_length is not None
        longest = min(self.config.max_length, tokenizer.model_max_length)
        encoded = tokenizer(texts, truncation=True, max_length=longest)
        return TokenTable.build(encoded["input_ids"], labels)

    def _rows(self, split: str) -> tuple[Any, str]:
        """A split's rows as a pyarrow table, and what to call it in messages."""
        name = self.config.data
        assert name is not None
        if is_local(name):
            path = find_split(Path(name), split)
            return read_rows(path), str(path)
        from datasets import load_dataset

        dataset = from_hub("--data", name, lambda: load_dataset(name, split=split))
        return dataset.data.table, f"{name} ({split})"

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._load(AutoTokenizer.from_pretrained)

    def model(self, data: TokenData) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = self._load(AutoConfig.from_pretrained, **label_maps(data.labels))
        set_dropout(config, self.config.dropout)
        return self._load(
            AutoModelForSequenceClassification.from_pretrained,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # a head of another task gives way to a new one
        )

    def _load(self, load: Callable[..., Loaded], **kwargs: Any) -> Loaded:
        name = self.config.model
        assert name is not None
        return from_hub("--model", name, lambda: load(name, **kwargs))

    def save_tokenizer(self, folder: Path) -> None:
        self._tokenizer().save_pretrained(folder)


def from_hub(flag: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Loads something by name; a hub that is out of reach gives one clear line.

    Raises:
        UsageError: it is neither a readable folder, nor in the cache, nor on a hub in reach.
    """
    try:
        return load()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        if is_local(name):
            raise UsageError(f"{flag} {name!r} cannot be loaded: {first_line}") from error
        raise UsageError(
            f"{flag} {name!r} is neither a local folder nor to be had from the hub: {first_line}",
            "without internet on the nodes, download it on the login node (hf download ...) and "
            f"give its folder: {flag} DIR",
        ) from error
