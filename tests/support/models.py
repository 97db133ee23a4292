"""Small real models and data sets, made on the spot."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

LABELS = ["sadness", "joy", "love", "anger", "fear", "surprise"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = LABELS + [f"word{i}" for i in range(40)]


def write_model(
    folder: Path, max_positions: int = 64, words: int = 0, spread: float = 0.02
) -> Path:
    """Saves a one-layer BERT with random weights and a WordPiece tokenizer of WORDS.

    Args:
        words: more words in its vocabulary, that no text has.
        spread: standard deviation of its weights; with 0.3 it learns words in few steps.
    """
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = [*SPECIALS, *WORDS, *(f"more{i}" for i in range(words))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=max_positions,
        initializer_range=spread,
    )
    BertModel(config).save_pretrained(folder)
    return folder


PROMPTS = {"query": "word1 word2 ", "document": ""}


def write_sentence_model(folder: Path, default_prompt: str | None = "query") -> Path:
    """Saves a model of sentence-transformers: the BERT above, its first token, a linear layer with
    a tanh, and PROMPTS; without Normalize."""
    import torch
    from safetensors.torch import save_file

    write_model(folder, spread=0.3)
    places = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = []
    for number, (name, path) in enumerate(places.items()):
        module = {"idx": number, "name": str(number), "path": path}
        modules.append(module | {"type": f"sentence_transformers.models.{name}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"prompts": PROMPTS, "default_prompt_name": default_prompt}
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(settings))
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    dense = {
        "in_features": 32,
        "out_features": 16,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    for path, config in (("1_Pooling", pooling), ("2_Dense", dense)):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {
        "linear.weight": torch.randn(16, 32, generator=generator) / 4,
        "linear.bias": torch.randn(16, generator=generator) / 4,
    }
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder


def write_splits(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    """Writes the rows of every split as .jsonl."""
    folder.mkdir(parents=True)
    for split, values in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in values)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def write_cached(home: Path, name: str, rows: dict[str, list[dict[str, Any]]]) -> Path:
    """Writes a data set into a cache of datasets as one of the hub; returns its folder."""
    import datasets

    owner, short_name = name.split("/")
    source = write_splits(home / "sources" / short_name, rows)
    files = {split: str(source / f"{split}.jsonl") for split in rows}
    made = home / "made" / short_name
    datasets.load_dataset("json", data_files=files, cache_dir=str(made))
    (from_json,) = (made / "json").glob("*/*/*/")
    folder = home / "datasets" / f"{owner}___{short_name}/default/0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    for path in from_json.glob("*.arrow"):
        split = path.stem.rpartition("-")[2]
        (folder / f"{short_name}-{split}.arrow").write_bytes(path.read_bytes())
    info = json.loads((from_json / "dataset_info.json").read_text())
    info |= {"dataset_name": short_name, "config_name": "default"}
    for split in info["splits"].values():
        split["dataset_name"] = short_name
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def write_pairs(
    folder: Path,
    columns: tuple[str, str | None],
    labels: int,
    sizes: dict[str, int],
) -> Path:
    """Writes sentences, or pairs of them, whose first word tells the label.

    Args:
        columns: of the text, and of the second one or None.
        labels: how many classes; 0: the label is a number from 0 to 5.
        sizes: rows of every split.
    """
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        label = rng.randrange(labels or 6)
        words = [LABELS[label], *rng.choices(WORDS, k=rng.randint(1, 12))]
        made: dict[str, Any] = {columns[0]: " ".join(words), "label": label}
        if columns[1]:
            made[columns[1]] = " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
        return made if labels else made | {"label": label * 0.8 + 0.1}

    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )


def write_squad(folder: Path, train: int, validation: int, none: bool = False) -> Path:
    """Writes questions for the word behind one of the LABELS; with `none`, some without answer."""
    rng = random.Random(0)

    def row(number: int) -> dict[str, Any]:
        label = rng.choice(LABELS)
        words = rng.choices(WORDS[len(LABELS) :], k=rng.randint(6, 60))
        place = rng.randrange(len(words) - 1)
        words[place] = label
        start = len(" ".join(words[: place + 1])) + 1
        has = not none or number % 3 > 0
        gold = {"text": [words[place + 1]] * has, "answer_start": [start] * has}
        question = f"{label} {'word0' if has else 'word1'}"
        context = " ".join(words)
        return {
            "id": f"q{number}",
            "question": question,
            "context": context,
            "answers": gold,
        }

    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {k: [row(i) for i in range(n)] for k, n in sizes.items()}
    )


def write_emotion(folder: Path, train: int, validation: int, more: int = 0) -> Path:
    """Writes texts that name their label among other words, as .jsonl.

    Args:
        more: so many of the model's further words are in them as well.
    """
    folder.mkdir(parents=True)
    rng = random.Random(0)
    further = iter(range(more))
    for split, count in (("train", train), ("validation", validation)):
        with open(folder / f"{split}.jsonl", "w") as file:
            for _ in range(count):
                label = rng.randrange(len(LABELS))
                words = rng.choices(WORDS[len(LABELS) :], k=rng.randint(1, 20))
                words.insert(rng.randint(0, len(words)), LABELS[label])
                words += [
                    f"more{i}" for i in itertools.islice(further, 1 + more // train)
                ]
                file.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")
    return folder


RAISING_TASK = """
from slurmft.train.task_facts import TaskFacts
from slurmft.train.tasks import sequence


class Task(sequence.Task):
    facts = TaskFacts(labels=("sadness", "joy", "love", "anger", "fear", "surprise"))

    def batch(self, batch, table):
        longest = int(batch.lengths.max())
        if longest > 24:
            raise ValueError(f"a text of {longest} tokens is longer than 24")
        return batch
"""


def write_raising(folder: Path) -> str:
    """Writes a task of one's own into a new folder, with texts in `data`: the rank that gets the
    last of them raises, alone.

    Returns:
        The task's name, as a command in that folder finds it.
    """
    data = write_emotion(folder / "data", train=60, validation=8)
    with open(data / "train.jsonl", "a") as file:
        file.write(json.dumps({"text": "word1 " * 40, "label": 0}) + "\n")
    # A name that Python has not cached.
    name = f"raising_{os.getpid()}_{next(_numbers)}"
    (folder / f"{name}.py").write_text(RAISING_TASK)
    return f"{name}:Task"


_numbers = itertools.count()


def write_words(folder: Path, train: int, validation: int) -> Path:
    """Writes texts as lists of words with labels: two of LABELS are an entity, of the first
    one's type; lengths differ much."""
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        words = rng.choices(WORDS[len(LABELS) :], k=rng.choice((1, 2, 3, 20)))
        tags = ["O"] * len(words)
        for at in range(0, len(words) - 1, 4):
            i = rng.randrange(3)
            words[at : at + 2] = LABELS[i], LABELS[3 + i]
            tags[at : at + 2] = f"B-{LABELS[i]}", f"I-{LABELS[i]}"
        return {"tokens": words, "tags": tags}

    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )


def write_reviews(folder: Path, train: int, validation: int) -> Path:
    """Writes texts whose stars, 1 to 5, are a word that they begin with, thrice."""
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        stars = rng.randint(1, 5)
        words = [LABELS[stars]] * 3 + rng.choices(
            WORDS[len(LABELS) :], k=rng.randint(0, 3)
        )
        return {"review": " ".join(words), "stars": stars}

    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|> {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_decoder(
    folder: Path,
    template: str | None = CHAT_TEMPLATE,
    pad: str | None = None,
    eos: str | None = "<|end|>",
    **sizes: Any,
) -> Path:
    """Saves a one-layer Llama with random weights and a word-level tokenizer of WORDS.

    Args:
        template: of chats.
        sizes: of the model's configuration.
    """
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = [
        "<unk>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "\n",
        *WORDS,
    ]
    level = models.WordLevel(
        {name: i for i, name in enumerate(names)}, unk_token="<unk>"
    )
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" +"), "removed")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=names[1:5],
        chat_template=template,
        model_max_length=512,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    own = {
        "vocab_size": len(names),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    LlamaForCausalLM(LlamaConfig(**own | sizes)).save_pretrained(folder)
    return folder


def made_text(rng: random.Random, words: int) -> str:
    """Words of which each tells the next but for a choice of two."""
    found = [rng.randrange(len(WORDS))]
    for _ in range(words - 1):
        found.append((3 * found[-1] + rng.choice((1, 20))) % len(WORDS))
    return " ".join(WORDS[i] for i in found)


def write_documents(folder: Path, train: int, validation: int) -> Path:
    """Writes texts of uneven lengths that `made_text` makes: their perplexity is a bit over 2."""
    rng = random.Random(0)
    sizes = {"train": train, "validation": validation}
    rows = {
        k: [{"text": made_text(rng, rng.choice((3, 20, 90)))} for _ in range(n)]
        for k, n in sizes.items()
    }
    return write_splits(folder, rows)


def write_chats(folder: Path, train: int, validation: int) -> Path:
    """Writes conversations of one to three turns: the assistant answers with the words in reverse
    order of their numbers, which are two words of LABELS."""
    rng = random.Random(0)

    def turn() -> list[dict[str, str]]:
        words = rng.sample(LABELS, 2)
        asked = [*rng.choices(WORDS[len(LABELS) :], k=rng.choice((1, 12))), words[0]]
        return [
            {"role": "user", "content": " ".join(asked)},
            {"role": "assistant", "content": " ".join([words[0], "word7", words[0]])},
        ]

    def row() -> dict[str, Any]:
        return {"messages": [m for _ in range(rng.randint(1, 3)) for m in turn()]}

    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )


def write_compared(folder: Path, sizes: dict[str, int]) -> Path:
    """Writes triplets: an anchor, a text that has two of its words, and one that need not; and a
    score of the first two."""
    rng = random.Random(0)

    def text(most: int, *words: str) -> str:
        return " ".join([*words, *rng.choices(WORDS, k=rng.randint(1, most))])

    def row() -> dict[str, Any]:
        key = rng.sample(WORDS, 2)
        return {
            "anchor": text(3, *key),
            "positive": text(12, *reversed(key)),
            "negative": text(20),
            "score": rng.randint(0, 10) / 10,
        }

    return write_splits(
        folder, {split: [row() for _ in range(n)] for split, n in sizes.items()}
    )


def write_many_labels(
    folder: Path, train: int, validation: int, columns: int = 0
) -> Path:
    """Writes texts that name each of their labels, none to three of LABELS.

    Args:
        columns: as .csv, with a column of 0 and 1 for each of so many labels.
    """
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        own = sorted(
            rng.sample(LABELS[: columns or None], k=rng.choice((0, 1, 1, 2, 3)))
        )
        words = [*own, *rng.choices(WORDS[len(LABELS) :], k=rng.randint(1, 4))]
        named = (
            {name: int(name in own) for name in LABELS[:columns]}
            if columns
            else {"labels": own}
        )
        return {"text": " ".join(words)} | named

    rows = {
        split: [row() for _ in range(n)]
        for split, n in (("train", train), ("validation", validation))
    }
    if not columns:
        return write_splits(folder, rows)
    folder.mkdir(parents=True)
    for split, values in rows.items():
        lines = [",".join(map(str, each.values())) for each in values]
        (folder / f"{split}.csv").write_text(
            "\n".join([",".join(values[0]), *lines]) + "\n"
        )
    return folder


def write_seq2seq_model(folder: Path, kind: str = "t5") -> Path:
    """Saves a small T5, or one of Bart's kin by the name of its classes, with random weights, and a
    tokenizer whose tokens are WORDS."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<pad>", "</s>", "<unk>", *WORDS]
    level = models.WordLevel(
        {name: i for i, name in enumerate(names)}, unk_token="<unk>"
    )
    words = Tokenizer(level)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=len(names),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=1,
            num_heads=4,
            **ids,
        )
        transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    else:
        name = "Bart" if kind == "bart" else kind
        config = getattr(transformers, f"{name}Config")(
            vocab_size=len(names), d_model=64, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
            decoder_ffn_dim=128, max_position_embeddings=64, init_std=0.1, bos_token_id=0,
            forced_eos_token_id=None, **ids,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        model.save_pretrained(folder)
    return folder


def write_copies(folder: Path, train: int, validation: int) -> Path:
    """Writes texts of two to five words, and targets that have the same words."""
    rng = random.Random(0)

    def row() -> dict[str, Any]:
        text = " ".join(rng.choices(WORDS, k=rng.randint(2, 5)))
        return {"text": text, "summary": text}

    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )
