"""The model that a run saves: which one, and in which type."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slurmft.train.engine.saved_weights import rounded
from tests.conftest import Done, records, slurmft
from tests.support.models import write_emotion, write_model


def losing_data(folder: Path) -> Path:
    """Texts whose labels are drawn at random: what is learnt of them helps nobody."""
    data = write_emotion(folder, train=96, validation=48)
    draw = np.random.default_rng(0)
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (data / f"{name}.jsonl").open()]
        for row in rows:
            row["label"] = int(draw.integers(6))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{name}.jsonl").write_text(text)
    return data


@pytest.mark.extra("training")
@pytest.mark.processes
def test_the_best_model_is_saved(tmp_path: Path) -> None:
    data = losing_data(tmp_path / "data")
    model = write_model(tmp_path / "model", spread=0.3)

    def train(*more: str) -> Done:
        return slurmft(
            "submit", "--follow", "--cluster", "local", "--nodes", "1", "--task", "emotion",
            *("--data", str(data), "--model", str(model), "--runs-dir", str(tmp_path / "runs")),
            *("--epochs", "8", "--batch-size", "16", "--learning-rate", "1e-2"),
            *("--precision", "fp32", "--dropout", "0", *more), imported=True,
        )  # fmt: skip

    best, last = train(), train("--save", "last")
    by_loss = train("--metric", "loss")
    losses = [each["metrics"]["loss"] for each in records(by_loss.run, "epoch")]
    assert by_loss.result["metrics"]["loss"] == min(losses) < losses[-1]
    assert by_loss.result["primary_metric"] == "loss"
    assert "the best checkpoint is the one with the lowest loss" in by_loss.out
    values = []
    for done in (best, last):
        assert done.code == 0, done.err
        epochs = records(done.run, "epoch")
        values.append([each["metrics"]["accuracy"] for each in epochs])
    assert values[0] == values[1]
    assert max(values[0]) > values[0][-1]  # or the test would show nothing
    assert best.result["metrics"]["accuracy"] == max(values[0])
    assert last.result["metrics"]["accuracy"] == values[0][-1]
    epoch = values[0].index(max(values[0])) + 1
    assert f"saves the model of epoch {epoch}: accuracy" in best.out
    assert "saves the model of" not in last.out
    assert by_transformers(best.run.model, data) == pytest.approx(max(values[0]))
    assert by_transformers(last.run.model, data) == pytest.approx(values[0][-1])


def by_transformers(folder: Path, data: Path) -> float:
    """The accuracy of a saved model, by a pipeline of transformers."""
    from transformers import pipeline

    rows = [json.loads(line) for line in (data / "validation.jsonl").open()]
    classify = pipeline("text-classification", str(folder), device="cpu")
    names = classify.model.config.id2label
    labels = [names[row["label"]] for row in rows]
    answers = classify([row["text"] for row in rows])
    return float(
        np.mean([a["label"] == b for a, b in zip(answers, labels, strict=True)])
    )


def test_tied_weights_are_rounded_once() -> None:
    """And a square matrix and its transpose, in one place, are two."""
    matrix = torch.arange(9.0).reshape(3, 3) + 1 / 3
    weights = {"a": matrix, "b": matrix, "c": matrix.T, "d": torch.arange(3)}
    saved = rounded(weights, torch.bfloat16)
    assert saved["a"].data_ptr() == saved["b"].data_ptr()
    for name, weight in weights.items():
        expected = weight if name == "d" else weight.to(torch.bfloat16)
        assert torch.equal(saved[name], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_saved_in_their_type(dtype: str, tmp_path: Path) -> None:
    """As transformers itself saves a model of that type."""
    from safetensors.torch import load_file
    from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

    from slurmft.train.engine.saved_weights import save_whole

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64)
    model = GPT2LMHeadModel(config)  # head and embeddings share memory
    kind = getattr(torch, dtype)
    save_whole(model, tmp_path / "ours", None, kind)
    model.to(kind).save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == kind
        assert torch.equal(weight, theirs[name])
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("ours", "theirs")
    ]
    assert configs[0] == configs[1]
    assert AutoModel.from_pretrained(tmp_path / "ours", dtype="auto").dtype == kind


@pytest.mark.processes
@pytest.mark.extra("training")
@pytest.mark.parametrize("flag", ["auto", "fp32"])
def test_a_base_in_bf16(flag: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel

    base = write_model(tmp_path / "base")
    model = AutoModel.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    data = write_emotion(tmp_path / "data", train=48, validation=16)
    done = slurmft(
        "submit", "--follow", "--cluster", "local", "--nodes", "1", "--task", "emotion",
        *("--data", str(data), "--model", str(base), "--runs-dir", str(tmp_path / "runs")),
        *("--epochs", "1", "--save-dtype", flag), imported=True,
    )  # fmt: skip
    assert done.code == 0, done.err
    weights = load_file(done.run.model / "model.safetensors")
    expected = {"auto": torch.bfloat16, "fp32": torch.float32}[flag]
    assert {weight.dtype for weight in weights.values()} == {expected}


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_labels_are_those_of_the_trainer(smoothing: float) -> None:
    """Of tokens, some of which have no label."""
    from transformers.trainer_pt_utils import LabelSmoother

    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.data.tables import IGNORED, TokenTable

    config = TrainConfig.resolve(task="synthetic", label_smoothing=smoothing)
    task = tasks.get(config)
    table = TokenTable.build(
        [[1, 1, 1], [1, 1, 1]], token_labels=[[0, IGNORED, 0], [0, 1, 2]]
    )
    batch = table.batch(np.array([0, 1]), 0)
    labels = batch.targets["labels"]
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn((*labels.shape, 3), generator=draw)
    total, count = task.loss(SimpleNamespace(logits=logits), batch)
    outputs: Any = {"logits": logits}
    expected = LabelSmoother(epsilon=smoothing)(outputs, labels.clone())
    assert float(total / count) == pytest.approx(float(expected))
