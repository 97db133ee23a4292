"""Outputs are those of plain transformers: of any head, any tokenizer, and any text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine import packing
from slurmft.train.engine.packing import Form
from slurmft.train.login import model_card
from slurmft.train.login.sources import localize
from slurmft.train.loop import saved_model
from slurmft.train.loop.loaded_model import LoadedModel, recompute_activations
from tests.conftest import slurmft
from tests.support.models import (
    write_compared,
    write_copies,
    write_decoder,
    write_documents,
    write_model,
    write_pairs,
    write_seq2seq_model,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_trainer import EXACT, train

PAD = "<|system|>"
"""The decoder's token of padding."""
PAD_ID = 4


def decoder_of(
    folder: Path, ends_with_pad: bool = False, pad: str | None = PAD
) -> Path:
    """A Llama as Qwen's are published: its configuration names no padding, its tokenizer does.

    Args:
        ends_with_pad: the tokenizer ends texts with that token, as that of Qwen3-Embedding does.
        pad: None: the tokenizer names no padding, either, as Llama's and GPT-2's.
    """
    write_decoder(folder, pad=pad, initializer_range=0.2)
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] is None
    if ends_with_pad:
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.post_processor = TemplateProcessing(
            single=f"$A {PAD}", special_tokens=[(PAD, PAD_ID)]
        )
        tokenizer.save(file)
    return folder


def sentences(folder: Path, *more: str, train: int = 40, validation: int = 20) -> Path:
    """Texts in three classes; some more of them in both splits."""
    sizes = {"train": train, "validation": validation}
    write_pairs(folder, ("text", None), 3, sizes)
    for split in sizes:
        with open(folder / f"{split}.jsonl", "a") as file:
            for text in more:
                file.write(json.dumps({"text": text, "label": 0}) + "\n")
    return folder


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    text = (folder / f"{split}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def accuracy_by_pipeline(model: Path, data: Path) -> float:
    """The accuracy of a saved model, by transformers alone, a text at a time."""
    classify = transformers.pipeline("text-classification", str(model), device="cpu")
    rows = [row for row in rows_of(data, "validation") if row["text"]]
    predicted = [classify(row["text"])[0]["label"] for row in rows]
    return float(
        np.mean([p == str(r["label"]) for p, r in zip(predicted, rows, strict=True)])
    )


TASK = ("--task", "text-classification", "--learning-rate", "0.01", "--epochs", "2")


@pytest.mark.extra("training")
@pytest.mark.processes
@pytest.mark.parametrize(
    "tokenizer", [{}, {"ends_with_pad": True}, {"pad": None}], ids=str
)
def test_decoders_as_classifiers(tokenizer: dict[str, Any], tmp_path: Path) -> None:
    """The result is that of the saved model, by transformers' pipeline and by `slurmft predict`;
    with packed batches and with padded ones."""
    model = decoder_of(tmp_path / "model", **tokenizer)
    data = sentences(tmp_path / "data", train=80, validation=60)
    source = ("--data", str(data), "--model", str(model), "--batch-size", "8")
    losses = []
    for batching in ("packed", "dynamic"):
        done = train(
            tmp_path / batching, *TASK, *source, *EXACT, "--batching", batching
        )
        assert done.code == 0, done.err
        assert "other outputs" not in done.err
        accuracy = done.result["metrics"]["accuracy"]
        assert accuracy == accuracy_by_pipeline(done.run.model, data)
        losses.append(done.result["loss"])
        compared = done.result["saved_model"]
        assert compared["samples"] == 4
        assert compared["largest_difference"] < 1e-4
        assert "saved model  " in done.out
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    output = tmp_path / "predictions.jsonl"
    file = str(data / "validation.jsonl")
    flags = ("--output", str(output), "--cluster", "local", "--follow")
    runs = ("--runs-dir", str(tmp_path / "predictions"))
    predicted = slurmft(
        "predict", str(done.run.path), file, *flags, *runs, imported=True
    )
    assert predicted.code == 0, predicted.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert np.mean([row["prediction"] == row["label"] for row in rows]) == accuracy


def test_the_end_of_texts_pads_where_nothing_does(tmp_path: Path) -> None:
    """As transformers' users let it: their outputs, also of a text that ends so."""
    folder = decoder_of(tmp_path / "model", pad=None)
    data = sentences(tmp_path / "data", "joy love <|end|>", train=20, validation=8)
    source = {"data": str(data), "model": str(folder)}
    task: Any = tasks.get(TrainConfig.resolve(task="text-classification", **source))
    tokens = task.prepare()
    model = task.model(tokens).eval()
    table = tokens.validation
    assert len(np.unique(table.lengths(np.arange(len(table))))) > 1
    batch = table.batch(np.arange(len(table)), tokens.pad_id)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, pad_token_id=tokenizer.eos_token_id
    )
    theirs.load_state_dict(model.state_dict())
    texts = [row["text"] for row in rows_of(data, "validation")]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = theirs.eval()(**inputs).logits
        logits = model(**batch.inputs).logits
    assert torch.allclose(logits, expected, atol=1e-6)
    assert theirs.config.pad_token_id == model.config.pad_token_id


@pytest.mark.parametrize("order", [["2", "0", "1"], ["0", "1", "2"], ["a", "b", "c"]])
def test_classes_are_in_the_order_of_the_model(
    tmp_path: Path, order: list[str]
) -> None:
    """As run_glue.py of transformers has them: a head that knows the classes goes on from there."""
    folder = decoder_of(tmp_path / "base")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, id2label=dict(enumerate(order)), pad_token_id=PAD_ID
    )
    theirs.save_pretrained(folder)
    data = sentences(tmp_path / "data", train=20, validation=8)
    source = {"data": str(data), "model": str(folder)}
    task: Any = tasks.get(TrainConfig.resolve(task="text-classification", **source))
    tokens = task.prepare()
    is_same = sorted(order) == ["0", "1", "2"]
    expected = order if is_same else ["0", "1", "2"]
    assert tokens.labels == expected
    rows = rows_of(data, "validation")
    labels = [tokens.labels[int(n)] for n in tokens.validation.labels]
    assert labels == [str(row["label"]) for row in rows]
    model = task.model(tokens).eval()
    assert model.config.id2label == dict(enumerate(expected))
    batch = tokens.validation.batch(np.arange(len(rows)), tokens.pad_id)
    with torch.inference_mode():
        logits = model(**batch.inputs).logits
        assert torch.allclose(logits, theirs.eval()(**batch.inputs).logits, atol=1e-6)


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("task", ["text-classification", "causal-lm", "embeddings"])
def test_a_padding_token_that_the_model_does_not_have(
    tmp_path: Path, task: str, in_config: bool
) -> None:
    """As `add_special_tokens` leaves it where the model is not resized: the end of text pads."""
    folder = decoder_of(tmp_path / "model", pad=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert tokenizer.pad_token_id == config["vocab_size"]
    if in_config:
        file.write_text(json.dumps(config | {"pad_token_id": config["vocab_size"]}))
    data = tmp_path / "data"
    match task:
        case "text-classification":
            sentences(data, "joy love", train=20, validation=8)
        case "causal-lm":
            write_documents(data, 20, 8)
        case _:
            pair = {"anchor": "joy", "positive": "love"}
            write_splits(data, {"train": [pair] * 8, "validation": [pair] * 2})
    source: dict[str, Any] = {"data": str(data), "model": str(folder)}
    trained: Any = tasks.get(TrainConfig.resolve(task=task, **source))
    tokens = trained.prepare()
    assert tokens.pad_id == tokenizer.eos_token_id
    [note] = [note for note in tokens.notes if "'s padding token" in note]
    assert "'<new>'" in note
    assert "'<|end|>' pads" in note
    model = trained.model(tokens).eval()
    table = tokens.validation
    batch = table.batch(np.arange(len(table)), tokens.pad_id)
    with torch.inference_mode():
        output = model(**batch.inputs)
    assert torch.isfinite(output[0]).all()


@pytest.mark.processes
def test_a_text_without_tokens(tmp_path: Path) -> None:
    """It is the token of padding alone: what a padded batch of transformers would have."""
    model = decoder_of(tmp_path / "model")
    data = sentences(tmp_path / "data", "")
    source = ("--data", str(data), "--model", str(model), "--batch-size", "8")
    done = train(tmp_path / "runs", *TASK, *source, *EXACT)
    assert done.code == 0, done.err
    loaded = TokenData.load(done.run.tokens)
    assert loaded.train.tokens[loaded.train.offsets[-2] :].tolist() == [PAD_ID]


def test_words_without_tokens(tmp_path: Path) -> None:
    row: dict[str, Any] = {"tokens": [], "tags": []}
    rows = [{"tokens": ["joy", "word1"], "tags": ["B-X", "O"]}, row]
    data = write_splits(tmp_path / "data", {"train": rows * 2, "validation": rows})
    model = decoder_of(tmp_path / "model")
    config = TrainConfig.resolve(
        task="token-classification", data=str(data), model=str(model)
    )
    table = tasks.get(config).prepare().train
    assert table.lengths(np.arange(4)).tolist() == [2, 1, 2, 1]
    assert table.label_counts is not None
    assert table.label_counts.tolist() == [2, 0, 2, 0]


# --- positions ------------------------------------------------------------------------------------


def write_long(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model of 24 positions, whose tokenizer does not say so; a longer text in validation."""
    model = write_model(tmp_path / "model", max_positions=24)
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("model_max_length", None)
    file.write_text(json.dumps(config))
    sentences(folder)
    long_text = {"text": "word1 " * 40, "label": 0}
    with open(folder / "validation.jsonl", "a") as validation:
        validation.write(json.dumps(long_text) + "\n")
    return folder, model


def test_texts_are_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    """As transformers' run_glue.py does, and told."""
    folder, model = write_long(tmp_path / "data", tmp_path)
    config = TrainConfig.resolve(
        task="text-classification", data=str(folder), model=str(model)
    )
    data = tasks.get(config).prepare()
    assert data.longest == 24
    assert any("are cut to 24 tokens" in text for text in data.warnings)


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("Bert", {}, 40),
        ("Roberta", {"pad_token_id": 1}, 38),
        ("MPNet", {}, 38),
        ("GPT2", {"n_positions": 40}, 40),
        ("OPT", {"ffn_dim": 8, "word_embed_proj_dim": 8}, 40),
        ("Nystromformer", {"num_landmarks": 40, "segment_means_seq_len": 40}, 40),
        ("Llama", {}, None),
        ("T5", {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2}, None),
    ],
)
def test_positions_of_families(
    name: str, sizes: dict[str, int], most: int | None
) -> None:
    """The longest text is computed, and one more token is not; or there is no limit."""
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    common = {"vocab_size": 60, "intermediate_size": 8, "max_position_embeddings": 40}
    config = getattr(transformers, f"{name}Config")(**(small | common | sizes))
    model = getattr(transformers, f"{name}Model")(config).eval()
    limit, _ = packing.position_limits(model)
    assert (limit > 10**6) == (most is None)
    if most is None:
        return
    assert limit == most
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


def test_longer_texts_of_other_tasks_are_refused_at_once(tmp_path: Path) -> None:
    """A task of one's own may cut its texts otherwise."""
    data: Any = type("Data", (), {"longest": 25})
    loaded: Any = LoadedModel.__new__(LoadedModel)
    loaded.model = AutoModelForSequenceClassification.from_pretrained(
        write_model(tmp_path / "model", max_positions=24)
    )
    loaded._setup = type("Setup", (), {"data": data})
    loaded._positions, _ = packing.position_limits(loaded.model)
    with pytest.raises(UsageError, match="25 tokens is longer than the 24 positions"):
        loaded._check_lengths()


# --- heads that look for padding ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_heads_that_look_for_the_last_token(name: str) -> None:
    """Texts that end with the token of padding, have it within, or are nothing else."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    more = {"intermediate_size": 48, "max_position_embeddings": 40, "num_labels": 3}
    if name == "GPT2":
        heads = {"num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**(sizes | heads | more))
    config.initializer_range = 0.2
    config.pad_token_id = PAD_ID
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    packed = packing.pack(model)
    assert isinstance(packed, packing.Packing), packed
    assert packed.form is Form.LAST
    texts = [[7, 8, PAD_ID], [9, PAD_ID, 11, 12], [PAD_ID] * 2, [5], [PAD_ID, 6]]
    table = TokenTable.build(texts)
    assert packed.difference_for(table, PAD_ID) == 0
    expected = []
    for text in texts:  # the reference, each text alone
        expected.append(model(input_ids=torch.tensor([text])).logits)
    batch = table.packed(np.arange(len(texts)))
    packed.expect(batch.lengths, torch.device("cpu"))
    output = model(**batch.inputs).logits
    assert packing.difference(torch.cat(expected)[batch.indices], output) == 0


def write_xlnet(folder: Path) -> Path:
    write_model(folder)
    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0,
        summary_last_dropout=0.0, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    transformers.XLNetModel(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.extra("training")
@pytest.mark.processes
def test_a_head_that_reads_the_last_place(tmp_path: Path) -> None:
    """XLNet's: padding stands before its texts, and its result is that of the pipeline."""
    folder = write_xlnet(tmp_path / "model")
    # The shortest texts have one length: a batch of them has no padding.
    shortest = ("joy", "love", "fear", "anger")
    data = sentences(tmp_path / "data", *shortest, train=50, validation=60)
    source = ("--data", str(data), "--model", str(folder), "--batch-size", "8")
    done = train(tmp_path / "runs", *TASK, *source, *EXACT)
    assert done.code == 0, done.err
    accuracy = accuracy_by_pipeline(done.run.model, data)
    assert done.result["metrics"]["accuracy"] == accuracy
    output = tmp_path / "predictions.jsonl"
    predicted = slurmft(
        "predict", str(done.run.path), str(data / "validation.jsonl"), "--cluster", "local",
        *("--output", str(output), "--runs-dir", str(tmp_path / "runs"), "--follow"), imported=True,
    )  # fmt: skip
    assert predicted.code == 0, predicted.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert np.mean([row["prediction"] == row["label"] for row in rows]) == accuracy


FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "FNet": {},
    "ConvBert": {"embedding_size": 16, "conv_kernel_size": 9},
    "Yoso": {},
}
HEADS = {
    "Model": "embeddings",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "squad",
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_that_depend_on_padding(family: str, head: str) -> None:
    """Whatever the outputs are of: texts, tokens, or what vectors of texts are made of."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, initializer_range=0.2, pad_token_id=0, **FAMILIES[family],
    )  # fmt: skip
    model = getattr(transformers, f"{family}{head}")(config)
    texts = [range(2, 2 + length) for length in (3, 5, 9, 20)]
    labels: dict[str, Any] = {"labels": [0] * 4}
    if head == "ForTokenClassification":
        labels = {"token_labels": texts}
    table = TokenTable.build(texts, **labels)
    loaded = with_side(model, table, HEADS[head])
    warnings = loaded._setup.job.warnings
    width = loaded.batch(table, np.array([0, 1])).inputs["input_ids"].shape[1]
    assert not loaded._pads_left
    assert loaded.model.training
    assert loaded._setup.job.lines == []
    if family == "Bert":
        assert warnings == []
        assert width == 8  # of tensor cores
    else:
        assert "gives other outputs for a text in a padded batch" in warnings[0]
        assert width == 5


def with_side(model: Any, table: TokenTable, task: str, **given: Any) -> Any:
    """A loaded model on a GPU that has chosen the side of padding."""
    loaded: Any = object.__new__(LoadedModel)
    loaded.model = model
    loaded.packing = None
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    loaded._setup = SimpleNamespace(
        config=TrainConfig(task=task, **({"batching": "dynamic"} | given)), job=Job(),
        data=SimpleNamespace(train=table, pad_id=0, max_length=16), world=on_gpu,
        task=SimpleNamespace(batch=lambda batch, _: batch), precision="bf16",
    )  # fmt: skip
    loaded._positions = 64
    loaded._depends_on_padding = False
    loaded._pads_left = loaded._choose_side()
    return loaded


@pytest.mark.parametrize("classes", [3, 5])
@pytest.mark.parametrize("lengths", [(5, 6, 7, 8), (6, 6, 6, 6)])
def test_side_of_padding(lengths: tuple[int, ...], classes: int) -> None:
    """Also where a text has as many tokens as there are classes, and where all have one length:
    other texts, and --batching padded, bring padding."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        vocab_size=60, d_model=32, n_layer=1, n_head=4, d_inner=48, dropout=0.0,
        summary_last_dropout=0.0, initializer_range=0.3, pad_token_id=0, num_labels=classes,
    )  # fmt: skip
    model = transformers.XLNetForSequenceClassification(config)
    texts = [range(2 + length, 2 + 2 * length) for length in lengths]
    table = TokenTable.build(texts, [0] * 4)
    loaded = with_side(model, table, "text-classification")
    assert loaded._setup.job.warnings == []
    assert loaded._pads_left


def test_advice_for_outputs_that_depend_on_padding() -> None:
    """Batches of --batching padded have padding beside a single text as well."""
    torch.manual_seed(0)
    config = transformers.FNetConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, intermediate_size=48, pad_token_id=0,
    )  # fmt: skip
    model = transformers.FNetForSequenceClassification(config)
    table = TokenTable.build([range(2, 8)] * 4, [0] * 4)
    loaded = with_side(model, table, "text-classification", batching="padded")
    assert (
        "; --batching dynamic --eval-batch-size 1 evaluates"
        in loaded._setup.job.warnings[0]
    )


def test_padding_of_questions_for_longformer() -> None:
    """Its head looks for the separators of question and text, which are behind many tokens."""
    config = transformers.LongformerConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=66, attention_window=[8], sep_token_id=3,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.LongformerForQuestionAnswering(config)
    texts = [[4, *[7] * 5, 3, 3, *[8] * length, 3] for length in (30, 40)]
    table = TokenTable.build(texts, token_labels=texts)
    loaded = with_side(model, table, "squad")
    assert loaded._setup.job.lines == []
    assert loaded._setup.job.warnings == []


def test_a_model_that_cannot_be_tried_with_padding() -> None:
    """The log has why: it may hide that results depend on padding."""
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    table = TokenTable.build([range(2, 20)], [0])
    loaded = with_side(model, table, "text-classification")
    assert loaded._setup.job.warnings == []
    assert "could not be tried: IndexError" in loaded._setup.job.lines[0]


def test_blocks_of_attention(tmp_path: Path) -> None:
    """A text has one output, whichever texts were computed before."""
    folder = write_model(tmp_path / "model")
    config = transformers.BigBirdConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, block_size=4, num_random_blocks=1,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.BigBirdModel(config).save_pretrained(folder)
    data = sentences(tmp_path / "data", train=8, validation=4)
    given = {"task": "text-classification", "data": str(data), "model": str(folder)}
    task: Any = tasks.get(TrainConfig.resolve(**given))
    prepared = task.prepare()
    assert any("block_sparse" in note for note in prepared.notes)
    model = task.model(prepared).eval()
    long = torch.arange(2, 42)[None]
    with torch.no_grad():
        before = model(input_ids=long).logits
        model(input_ids=long[:, :5])
        assert torch.equal(model(input_ids=long).logits, before)
    assert model.config.attention_type == "original_full"


def test_padding_on_either_side() -> None:
    table = TokenTable.build([[1, 2, 3], [4]], [0, 1])
    for left, rows in ((False, [[1, 2, 3], [4, 9, 9]]), (True, [[1, 2, 3], [9, 9, 4]])):
        batch = table.batch(np.arange(2), 9, left=left)
        assert batch.inputs["input_ids"].tolist() == rows
        is_token = batch.inputs["input_ids"] != 9
        assert torch.equal(batch.inputs["attention_mask"].bool(), is_token)


def test_few_samples_to_try_a_model_with() -> None:
    """A batch of them has padding, wherever there are texts of two lengths."""

    def lengths_of_few(lengths: list[int]) -> list[int]:
        table = TokenTable.build([range(length) for length in lengths])
        few = table.few()
        # The token that ends a text stays: heads look for it.
        for tokens in (1, 2):
            cut = table.few(tokens)
            last = [length - 1 for length in few.lengths(np.arange(len(few)))]
            assert cut.tokens[cut.offsets[1:] - 1].tolist() == last
            assert cut.longest <= tokens
        values: list[int] = few.lengths(np.arange(len(few))).tolist()
        return values

    twos = [2] * 70
    assert lengths_of_few([5, 9, 1, 7, 3, 8, *twos]) == [1, 2, 3, 5]
    assert lengths_of_few([3, *twos]) == [2, 2, 2, 3]
    assert lengths_of_few([*twos, 7, 9]) == [2, 2, 7, 9]
    assert lengths_of_few(twos) == [2, 2, 2, 2]
    assert lengths_of_few([4, 6]) == [4, 6]


# --- weights that the loss does not use -----------------------------------------------------------


@pytest.mark.extra("training")
@pytest.mark.processes
@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_weights_that_the_loss_does_not_use(task: str, tmp_path: Path) -> None:
    """Two ranks train as one does: what is not used neither moves nor decays."""
    folder = write_model(tmp_path / "model")
    torch.manual_seed(0)
    if task == "text-classification":
        config: Any = transformers.XLNetConfig(
            vocab_size=60, d_model=32, n_layer=1, n_head=4, d_inner=48, pad_token_id=0,
        )  # fmt: skip
        transformers.XLNetModel(config).save_pretrained(folder)
        unused = "transformer.mask_emb"
        data = sentences(tmp_path / "data")
    else:
        # Its pooler is loaded, and no head of words reads it.
        config = transformers.BigBirdConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=48, max_position_embeddings=64,
        )  # fmt: skip
        transformers.BigBirdModel(config).save_pretrained(folder)
        unused = "bert.pooler.weight"
        data = write_words(tmp_path / "data", train=40, validation=20)
    source = ("--task", task, "--data", str(data), "--model", str(folder))
    flags = ("--epochs", "2", "--learning-rate", "0.01", "--weight-decay", "0.1")
    losses = []
    for nodes, batch in (("1", "8"), ("2", "4")):
        sizes = ("--nodes", nodes, "--batch-size", batch)
        done = train(tmp_path / nodes, *source, *flags, *EXACT, *sizes)
        assert done.code == 0, done.err
        losses.append(done.result["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    before = load_file(folder / "model.safetensors")
    after = load_file(done.run.model / "model.safetensors")
    short = unused.partition(".")[2]
    if unused in after:
        assert torch.equal(after[unused], before[short])


# --- the saved model ------------------------------------------------------------------------------


class Job:
    """What a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def run_of(folder: Path, task_name: str, data: Path, model: Path, **given: Any) -> Any:
    """The setup of a run on one rank, and its model, which is saved."""
    config = TrainConfig.resolve(
        task=task_name, data=str(data), model=str(model), **given
    )
    task = tasks.get(localize(config))
    world = SimpleNamespace(device=torch.device("cpu"), is_main=True)
    run_dir = SimpleNamespace(model=folder / "saved")
    setup: Any = SimpleNamespace(
        config=config, data=task.prepare(), task=task, world=world, job=Job(),
        run_dir=run_dir, precision="fp32",
    )  # fmt: skip
    loaded = LoadedModel(setup)
    loaded.save(run_dir.model)
    return setup, loaded


@pytest.mark.parametrize("batching", ["packed", "dynamic", "padded"])
@pytest.mark.parametrize(
    "name",
    ["text-classification", "token-classification", "squad", "seq2seq", "causal-lm"],
)
def test_a_saved_model_is_compared(
    name: str, batching: str, tmp_path: Path, tiny_model: Path
) -> None:
    """One that is another, by a single layer, is told; whatever the task and its batches."""
    model = tiny_model
    data = tmp_path / "data"
    given: dict[str, Any] = {"batching": batching, "max_length": 32}
    match name:
        case "token-classification":
            write_words(data, 40, 20)
        case "squad":
            write_squad(data, 40, 20)
            given |= {"doc_stride": 8}
        case "seq2seq":
            model = write_seq2seq_model(tmp_path / "t5")
            write_copies(data, 40, 20)
        case "causal-lm":
            model = write_decoder(tmp_path / "decoder")
            write_documents(data, 40, 20)
        case _:
            sentences(data)
    setup, loaded = run_of(tmp_path, name, data, model, **given)
    compared = saved_model.compare(setup, loaded)
    assert setup.job.warnings == [] or "without padding" in setup.job.warnings[0]
    assert compared is not None
    assert compared["largest_difference"] < 1e-4
    file = setup.run_dir.model / "model.safetensors"
    weights = load_file(file)
    for key, weight in weights.items():
        if weight.ndim == 2 and "embed" not in key and "shared" not in key:
            weights[key] = weight.roll(1, 0)
    save_file(weights, file, {"format": "pt"})
    compared = saved_model.compare(setup, loaded)
    assert compared is not None
    assert compared["largest_difference"] > 0.01
    assert "gives other outputs than the trained one" in setup.job.warnings[-1]
    for key, weight in weights.items():
        weights[key] = torch.full_like(weight, torch.nan)
    save_file(weights, file, {"format": "pt"})
    compared = saved_model.compare(setup, loaded)
    assert compared is not None
    assert math.isnan(compared["largest_difference"])
    assert "they differ by nan" in setup.job.warnings[-1]
    file.write_bytes(b"")
    assert saved_model.compare(setup, loaded) is None
    assert "could not be compared" in setup.job.warnings[-1]


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_a_saved_adapter_is_compared(
    merge: bool, use_dora: bool, tmp_path: Path, tiny_model: Path
) -> None:
    """As its card loads it: transformers alone leaves the magnitudes of DoRA out."""
    data = sentences(tmp_path / "data")
    setup, loaded = run_of(
        tmp_path, "text-classification", data, tiny_model,
        lora=2, use_dora=use_dora, merge=merge,
    )  # fmt: skip
    for name, weight in loaded.model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    loaded.save(setup.run_dir.model)
    compared = saved_model.compare(setup, loaded)
    assert compared is not None
    assert compared["largest_difference"] < 1e-4
    code = model_card._code(setup.config, {})
    assert ("PeftModel" in code) == (use_dora and not merge)


def test_padding_in_the_wrong_place_is_seen_beside_the_saved_model(
    tmp_path: Path,
) -> None:
    data = sentences(tmp_path / "data")
    model = write_xlnet(tmp_path / "model")
    setup, loaded = run_of(
        tmp_path, "text-classification", data, model, batching="dynamic"
    )
    compared = saved_model.compare(setup, loaded)
    assert compared is not None
    assert compared["largest_difference"] < 1e-4
    loaded._pads_left = False
    compared = saved_model.compare(setup, loaded)
    assert compared is not None
    assert compared["largest_difference"] > 0.01
    assert "gives other outputs than the trained one" in setup.job.warnings[-1]


@pytest.mark.parametrize(
    "name",
    ["text-classification", "token-classification", "squad", "embeddings"],
)
def test_padding_is_no_longer_than_the_positions(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Of a larger --max-length, and of a multiple that fills tensor cores; the log says it."""
    data = tmp_path / "data"
    given: dict[str, Any] = {"batching": "padded", "max_length": 300}
    match name:
        case "token-classification":
            write_words(data, 40, 20)
        case "squad":
            write_squad(data, 40, 20)
            given |= {"doc_stride": 8}
        case "embeddings":
            write_compared(data, {"train": 40, "validation": 20})
        case _:
            sentences(data)
    setup, loaded = run_of(tmp_path, name, data, tiny_model, **given)
    (note,) = (note for note in setup.data.notes if "--max-length" in note)
    assert note.startswith("--max-length 300: the model takes 64 tokens")
    samples = np.arange(2)
    batch = loaded.batch(setup.data.train, samples)
    assert batch.inputs["input_ids"].shape[1] == 64
    table = setup.data.train
    with torch.no_grad():
        loaded.model(**table.batch(samples, 0, multiple=48, most=64).inputs)


def test_models_that_cannot_compute_layers_again() -> None:
    sizes = {"vocab_size": 60, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
    model = transformers.XLMModel(transformers.XLMConfig(**sizes))
    with pytest.raises(UsageError, match="XLMModel does not support it"):
        recompute_activations(model)
