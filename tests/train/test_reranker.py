"""Rerankers: the loss and the scores of sentence-transformers' CrossEncoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from tests.conftest import Done, records, slurmft
from tests.support.models import (
    write_compared,
    write_decoder,
    write_model,
    write_splits,
)
from tests.train.test_trainer import EXACT, train

COLUMNS = {"text_column": "anchor", "text_pair_column": "positive"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that go together, or do not."""
    folder = tmp_path_factory.mktemp("pairs")
    compared = write_compared(folder / "compared", {"train": 60, "validation": 20})
    splits = {}
    for split in ("train", "validation"):
        rows = rows_of(compared, split)
        splits[split] = [pair for row in rows for pair in both(row)]
    return write_splits(folder / "data", splits)


def rows_of(data: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").open()]


def both(row: dict[str, Any]) -> list[dict[str, Any]]:
    texts = (row["positive"], row["negative"])
    return [
        {"query": row["anchor"], "passage": text, "label": label}
        for text, label in zip(texts, (1, 0), strict=True)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "quick", spread=0.3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pairs: Path, model: Path) -> Done:
    done = train(
        tmp_path_factory.mktemp("trained"),
        *("--task", "reranker", "--data", str(pairs), "--model", str(model), *EXACT),
        *("--epochs", "4", "--batch-size", "16", "--learning-rate", "0.01"),
    )
    assert done.code == 0, done.err
    return done


def config_of(data: Path, model: Path, **given: Any) -> TrainConfig:
    values = {"task": "reranker", "data": str(data), "model": str(model)} | given
    return localize(TrainConfig.resolve(**values))


@pytest.mark.processes
def test_scores_are_those_of_a_cross_encoder(
    trained: Done, pairs: Path, tmp_path: Path
) -> None:
    """Those of the evaluation, and of slurmft predict; the metrics are scikit-learn's of them."""
    st = pytest.importorskip("sentence_transformers")
    from sklearn.metrics import average_precision_score, log_loss

    rows = rows_of(pairs, "validation")
    encoder = st.CrossEncoder(str(trained.run.model), device="cpu")
    scores = encoder.predict([(row["query"], row["passage"]) for row in rows])
    labels = np.array([row["label"] for row in rows])
    expected = average_precision_score(labels, scores)
    metrics = trained.result["metrics"]
    assert list(metrics) == ["average_precision", "accuracy", "loss"]
    assert metrics["average_precision"] == pytest.approx(expected)
    assert metrics["accuracy"] == np.mean((scores >= 0.5) == labels)
    assert metrics["loss"] == pytest.approx(log_loss(labels, scores), abs=1e-5)
    output = tmp_path / "scores.jsonl"
    done = slurmft(
        *("predict", str(trained.run.path), str(pairs / "validation.jsonl")),
        *("--output", str(output), "--cluster", "local", "--follow", "--nodes", "1"),
        *("--precision", "fp32"),
        imported=True,
    )
    assert done.code == 0, done.err
    predictions = [json.loads(line)["prediction"] for line in output.open()]
    assert predictions == pytest.approx(scores, abs=1e-6)
    assert "CrossEncoder" in (trained.run.model / "README.md").read_text()


@pytest.mark.processes  # its import starts one
@pytest.mark.parametrize(
    "keys",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)  # fmt: skip
def test_scores_of_a_base_whose_scores_are_logits(
    keys: dict[str, Any], pairs: Path, tmp_path: Path
) -> None:
    """As MS MARCO's cross-encoders: those of the saved model are sigmoids all the same."""
    st = pytest.importorskip("sentence_transformers")
    base = write_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | keys))
    task: Any = tasks.get(config_of(pairs, base))
    task.model(task.prepare()).save_pretrained(tmp_path / "saved")
    task.tokenizer().save_pretrained(tmp_path / "saved")
    encoder = st.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    assert type(encoder.activation_fn).__name__ == "Sigmoid"


@pytest.mark.processes  # its import starts one
def test_loss_is_that_of_sentence_transformers(pairs: Path, model: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    task = tasks.get(config_of(pairs, model))
    data = task.prepare()
    torch.manual_seed(0)  # of the head
    own = task.model(data).eval()
    batch = data.train.batch(np.arange(8), data.pad_id)
    loss, count = task.loss(own(**batch.inputs), batch)
    encoder = st.CrossEncoder(str(model), num_labels=1, device="cpu").eval()
    encoder[0].model.load_state_dict(own.state_dict())
    rows = rows_of(pairs, "train")[:8]
    columns = [[row[name] for row in rows] for name in ("query", "passage")]
    labels = torch.tensor([float(row["label"]) for row in rows])
    expected = BinaryCrossEntropyLoss(encoder)(columns, labels)
    assert float(loss.detach()) / count == pytest.approx(
        float(expected.detach()), abs=1e-6
    )


def test_metrics_of_scores(tmp_path: Path, model: Path) -> None:
    """Where pairs are more than right or wrong, correlations are."""
    data = write_compared(tmp_path / "data", {"train": 9, "validation": 9})
    task = tasks.get(config_of(data, model, label_column="score", **COLUMNS))
    tokens = task.prepare()
    task.model(tokens)
    scores = tokens.validation.labels
    assert task.compute(scores, tokens) == pytest.approx({"spearman": 1, "pearson": 1})


@pytest.mark.parametrize("label", [-0.1, 2, "1.5", None, True])
def test_labels_that_are_wrong(
    label: Any, pairs: Path, tmp_path: Path, model: Path
) -> None:
    rows = rows_of(pairs, "train")
    wrong = [*rows[:2], rows[2] | {"label": label}]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": wrong})
    with pytest.raises(UsageError, match=f"row 3 has the (score|label) {label!r}"):
        inputs.check(config_of(data, model))


@pytest.mark.extra("training")
@pytest.mark.processes
def test_labels_that_are_all_equal_are_told(tmp_path: Path, model: Path) -> None:
    """At submission and in the job, which saves the last model; the card has no NaN."""
    rows = []
    for number in range(12):
        rows.append({"query": f"word{number}", "passage": "joy", "label": 0.5})
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows[:5]})
    done = train(
        tmp_path / "runs",
        *("--task", "reranker", "--data", str(data), "--model", str(model), *EXACT),
        *("--text-column", "query", "--text-pair-column", "passage"),
        *("--label-column", "label", "--max-steps", "1", "--batch-size", "8"),
    )
    assert done.code == 0, done.err
    assert "has one score only, 0.5" in done.err
    warnings = [each["text"] for each in records(done.run, "warning")]
    assert any("spearman is not finite in the evaluation" in text for text in warnings)
    assert any("the last model is saved, not the best" in text for text in warnings)
    card = (done.run.path / "model" / "README.md").read_text()
    assert "nan" not in card.lower().replace("name", "")


@pytest.mark.parametrize("value", [True, "false", "True"])
def test_labels_that_are_true_or_false(
    value: Any, pairs: Path, model: Path, tmp_path: Path
) -> None:
    rows = [*rows_of(pairs, "train"), {"query": "joy", "passage": "a", "label": value}]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    with pytest.raises(UsageError, match=f"has the label {value!r}") as error:
        inputs.check(config_of(data, model))
    assert "write 1 for true and 0 for false" in str(error.value.hint)


@pytest.mark.parametrize(
    ("prompts", "kinds", "message"),
    [
        ({"task": "word1 "}, ["Transformer"], "has the default prompt 'task'"),
        ({"task": ""}, ["Transformer", "LogitScore"], "Transformer, LogitScore of"),
        ({"task": ""}, ["Transformer"], ""),
    ],
)
def test_cross_encoders_whose_scores_training_cannot_make(
    prompts: dict[str, str],
    kinds: list[str],
    message: str,
    pairs: Path,
    tmp_path: Path,
) -> None:
    """They are refused at submission, and in the job."""
    base = write_model(tmp_path / "base")
    settings = {"model_type": "CrossEncoder", "default_prompt_name": "task"}
    file = base / "config_sentence_transformers.json"
    file.write_text(json.dumps(settings | {"prompts": prompts}))
    modules = []
    for number, kind in enumerate(kinds):
        module = {"idx": number, "path": "", "type": f"sentence_transformers.{kind}"}
        modules.append(module)
    (base / "modules.json").write_text(json.dumps(modules))
    config = config_of(pairs, base)
    task: Any = tasks.get(config)
    data = task.prepare()
    for check in (lambda: inputs.check(config), lambda: task.model(data)):
        if not message:
            check()
            continue
        with pytest.raises(UsageError, match=message) as error:
            check()
        assert error.value.hint


@pytest.mark.parametrize("name", ["reranker", "embeddings", "text-classification"])
def test_no_chat_template_writes_texts(name: str, tmp_path: Path, pairs: Path) -> None:
    """sentence-transformers would write them as messages, where the tokenizer has one."""
    folder = write_decoder(tmp_path / "model")
    columns = {"text_column": "query", "text_pair_column": "passage"}
    config = TrainConfig.resolve(
        task=name, data=str(pairs), model=str(folder), **columns
    )
    task: Any = tasks.get(localize(config))
    assert task.tokenizer().chat_template
    task.save_tokenizer(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert bool(saved.chat_template) == (name == "text-classification")
