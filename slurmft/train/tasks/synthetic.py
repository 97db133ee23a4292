"""Generated text for a DistilBERT with random weights: needs no hub and no files.

The lengths are those of the emotion data set (mean 22 tokens); a sample's label shows in its words
often enough to be learnt, and not so often that it is trivial.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.train.data.tables import TokenTable, offsets_of
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks import base
from slurmft.train.tasks.base import label_maps, set_dropout

LABELS = ["sadness", "joy", "love", "anger", "fear", "surprise"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD = 0
CLS = 2
SEP = 3

# Tokens of the 16,000 emotion training texts under BERT's uncased vocabulary, the two special
# tokens left out: mean 20.26, variance 134.0, 2 to 85. A gamma distribution of these moments has
# the quartiles 14, 20 and 28 with the special tokens; the texts have 13, 20 and 29.
LENGTH_SHAPE = 3.063
LENGTH_SCALE = 6.614
LENGTH_LIMITS = (2, 85)

SIGNAL = 0.2
"""Probability that a word is drawn from its label's own words."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of the data and of the model."""

    train: tuple[int, int]
    """Number of distinct samples, and how often they are repeated."""
    validation: tuple[int, int]
    vocabulary: int
    model: dict[str, int]
    """Sizes in the model's configuration; others are DistilBERT's own."""


PRESETS = {
    "quick": Preset(
        train=(8192, 1),
        validation=(2048, 1),
        vocabulary=8192,
        model={"dim": 128, "hidden_dim": 512, "n_layers": 2, "n_heads": 2},
    ),
    # As published: 8,192 rows four times over for training, 1,024 rows 128 times for evaluation.
    "paper": Preset(
        train=(8192, 4),
        validation=(1024, 128),
        vocabulary=30522,
        model={},
    ),
}


class Task(base.Task):
    """Sequence classification on generated tokens."""

    @property
    def preset(self) -> Preset:
        return PRESETS[str(self.config.preset)]

    def prepare(self) -> TokenData:
        """Generates both splits; the same seed gives the same data anywhere."""
        preset = self.preset
        seed = self.config.seed
        words = words_by_label(preset.vocabulary, seed)
        # A generator each: the size of one split does not change the other.
        train_rng = np.random.default_rng([seed, 1])
        validation_rng = np.random.default_rng([seed, 2])
        train = generate(*preset.train, words, train_rng)
        validation = generate(*preset.validation, words, validation_rng)
        return TokenData(train, validation, LABELS, PAD)

    def model(self, data: TokenData) -> Any:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        config = DistilBertConfig(
            vocab_size=self.preset.vocabulary,
            **self.preset.model,
            **label_maps(data),
        )
        set_dropout(config, self.config.dropout)
        return DistilBertForSequenceClassification(config)

    def save_tokenizer(self, folder: Path) -> None:
        """Writes a word-level tokenizer of the generated words, so that the model can be tried."""
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        names = vocabulary(self.preset.vocabulary)
        ids = {name: i for i, name in enumerate(names)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        end = ("[SEP]", SEP)
        start = ("[CLS]", CLS)
        tokenizer.post_processor = processors.BertProcessing(end, start)
        roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        special: dict[str, Any] = dict(zip(roles, SPECIALS, strict=True))
        fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        fast_tokenizer.save_pretrained(folder)


def vocabulary(size: int) -> list[str]:
    """Returns the special tokens, then made-up words."""
    return SPECIALS + [f"w{i}" for i in range(len(SPECIALS), size)]


def words_by_label(size: int, seed: int) -> np.ndarray:
    """Returns for every label the word ids that hint at it: int64, (labels, words)."""
    # Apart from the generators of the splits: both are made of the same hints.
    rng = np.random.default_rng([seed, 0])
    ids = rng.permutation(np.arange(len(SPECIALS), size))
    # One word in a hundred for each label, so that most words say nothing.
    count = size // 100
    hints = ids[: count * len(LABELS)]
    return hints.reshape(len(LABELS), count)


def generate(
    distinct: int,
    repeats: int,
    words: np.ndarray,
    rng: np.random.Generator,
) -> TokenTable:
    """Returns `distinct` samples, repeated; words follow a Zipf-like law as in real text.

    Args:
        words: see `words_by_label`.
    """
    labels = rng.integers(len(LABELS), size=distinct)
    drawn_lengths = rng.gamma(LENGTH_SHAPE, LENGTH_SCALE, distinct)
    lengths = np.rint(drawn_lengths).astype(np.int64)
    lengths = np.clip(lengths, *LENGTH_LIMITS) + 2  # with the special tokens
    total = int(lengths.sum())
    common_words = int(words.max()) + 1 - len(SPECIALS)
    # A cube of uniform numbers: low word ids are frequent, high ones rare.
    common = rng.random(total) ** 3 * common_words
    tokens = len(SPECIALS) + common.astype(np.int32)
    is_hint = rng.random(total) < SIGNAL
    choice = rng.integers(words.shape[1], size=total)
    label_of_token = np.repeat(labels, lengths)
    tokens[is_hint] = words[label_of_token[is_hint], choice[is_hint]]
    offsets = offsets_of(lengths)
    tokens[offsets[:-1]] = CLS
    tokens[offsets[1:] - 1] = SEP
    return TokenTable(
        tokens=np.tile(tokens, repeats),
        offsets=offsets_of(np.tile(lengths, repeats)),
        labels=np.tile(labels, repeats),
    )
