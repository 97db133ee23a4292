"""Small real models and data sets, made on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path

LABELS = ["sadness", "joy", "love", "anger", "fear", "surprise"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = LABELS + [f"word{i}" for i in range(40)]


def write_model(folder: Path, max_positions: int = 64) -> Path:
    """Saves a one-layer BERT with random weights and a WordPiece tokenizer of WORDS."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIALS, *WORDS]) + "\n")
    tokens = {word: i for i, word in enumerate([*SPECIALS, *WORDS])}
    BertTokenizerFast(vocab=tokens).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=max_positions,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_emotion(folder: Path, train: int, validation: int) -> Path:
    """Writes texts that name their label among other words, as .jsonl."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for split, count in (("train", train), ("validation", validation)):
        with open(folder / f"{split}.jsonl", "w") as file:
            for _ in range(count):
                label = rng.randrange(len(LABELS))
                words = rng.choices(WORDS[len(LABELS) :], k=rng.randint(1, 20))
                words.insert(rng.randint(0, len(words)), LABELS[label])
                file.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")
    return folder
