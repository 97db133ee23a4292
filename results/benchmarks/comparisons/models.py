"""Saved models, as plain transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import call, result

from comparisons.table import Row, check
from comparisons.trainings import SAMPLES, by_slurmft, read_rows

PIPELINE = "transformers' pipeline on the saved model"


@check("models", 1e-5)
def classifiers(folder: Path) -> Iterator[Row]:
    """Probabilities of the predicted classes; a class that differs counts as 1."""
    from tests.support.models import write_model, write_pairs

    data = write_pairs(folder / "data", ("text", None), 3, SAMPLES)
    models = {
        "BERT": write_model(folder / "bert", spread=0.3),
        "a decoder whose texts end with its pad token": ends_with_pad(folder / "llama"),
        "XLNet, whose tokenizer pads on the left": pads_left(folder / "xlnet"),
    }
    for name, model in models.items():
        run = by_slurmft(folder / model.name, "text-classification", data, model)
        expected = by_pipeline(run / "model", data)
        values = predictions(folder, run, data)
        differences = []
        for (label, score), (expected_label, expected_score) in zip(
            values, expected, strict=True
        ):
            differences.append(abs(score - expected_score))
            differences.append(float(label != expected_label))
        yield Row(f"{name}: `slurmft predict`", PIPELINE, max(differences))
        labels = [str(row["label"]) for row in read_rows(data, "validation")]
        right = [a == b for (a, _), b in zip(expected, labels, strict=True)]
        accuracy = sum(right) / len(right)
        difference = abs(result(run)["metrics"]["accuracy"] - accuracy)
        yield Row(f"{name}: accuracy of the run", PIPELINE, difference)


def by_pipeline(model: Path, data: Path) -> list[tuple[str, float]]:
    """Returns label and probability of each validation text, one text at a time."""
    from transformers import pipeline

    classify = pipeline("text-classification", str(model), device="cpu")
    answers = [classify(row["text"])[0] for row in read_rows(data, "validation")]
    return [(answer["label"], answer["score"]) for answer in answers]


def predictions(folder: Path, run: Path, data: Path) -> list[tuple[str, float]]:
    """Returns what `slurmft predict` writes of each validation text."""
    from tests.support import prepared

    output = folder / f"{run.name}.jsonl"
    call(
        *prepared.command("slurmft"), "predict", str(run), str(data / "validation.jsonl"),
        *("--output", str(output), "--cluster", "local", "--follow"),
        *("--runs-dir", str(folder / "predictions")),
        timeout_s=600,
    )  # fmt: skip
    rows = [json.loads(line) for line in output.open()]
    # The labels are numbers, as in the file; the pipeline names a class by its text.
    return [(str(row["prediction"]), row["probability"]) for row in rows]


def ends_with_pad(folder: Path) -> Path:
    """Saves a Llama whose tokenizer ends texts with its token of padding, which its configuration
    does not name, as those of Qwen3-Embedding."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from tests.support.models import write_decoder

    pad = "<|system|>"
    write_decoder(folder, pad=pad, initializer_range=0.2)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    number = tokenizer.token_to_id(pad)
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {pad}", special_tokens=[(pad, number)]
    )
    tokenizer.save(file)
    return folder


def pads_left(folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, XLNetConfig, XLNetModel

    from tests.support.models import write_model

    write_model(folder)
    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0,
        summary_last_dropout=0.0, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    XLNetModel(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.save_pretrained(folder)
    return folder


@check("models", 0)
def saved_types(folder: Path) -> Iterator[Row]:
    """How many weights of a saved model differ, in a bit or in their type."""
    import torch
    from safetensors.torch import load_file

    from slurmft.train.engine.saved_weights import save_whole
    from tests.support.packed_models import make

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = make("GPT2", "ForCausalLM")
        name = str(dtype).removeprefix("torch.")
        ours = folder / name / "ours"
        theirs = folder / name / "theirs"
        save_whole(model, ours, None, dtype)
        model.to(dtype).save_pretrained(theirs)
        weights, expected = (
            load_file(each / "model.safetensors") for each in (ours, theirs)
        )
        different = len(weights.keys() ^ expected.keys())
        for key in weights.keys() & expected.keys():
            different += not are_equal(weights[key], expected[key])
        check = f"weights saved in {name}: how many differ in a bit"
        yield Row(check, "transformers' `save_pretrained`", different)


def are_equal(one: Any, other: Any) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one, other)


@check("models", 0)
def bases_in_bf16(folder: Path) -> Iterator[Row]:
    """A run whose base is stored in bf16 saves the rounded weights of the run that saves fp32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    from tests.support.models import write_model, write_pairs

    data = write_pairs(folder / "data", ("text", None), 3, SAMPLES)
    base = write_model(folder / "base")
    AutoModel.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    weights = []
    for dtype in ("auto", "fp32"):
        run = by_slurmft(
            folder / dtype, "text-classification", data, base, "--save-dtype", dtype
        )
        weights.append(load_file(run / "model" / "model.safetensors"))
    rounded, whole = weights
    assert rounded.keys() == whole.keys()
    different = 0
    for name, weight in whole.items():
        different += not are_equal(rounded[name], weight.to(torch.bfloat16))
    check = "a base in bf16, trained: how many saved weights differ in a bit"
    yield Row(check, "`--save-dtype fp32`, rounded by torch", different)
