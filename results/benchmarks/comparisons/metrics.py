"""Metrics of the same predictions: by the tasks, and by the libraries that define them.

Predictions are of models of random weights, or labels of which a third are drawn again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from comparisons.table import Row, check
from comparisons.trainings import MAX_LENGTH, STRIDE

ROUNDING = 1e-12
COUNT = 500
"""Predictions of classes and numbers."""


# --- classes and numbers --------------------------------------------------------------------------


def some_labels(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns predictions and labels, of which about two thirds agree."""
    random = np.random.default_rng(0)
    labels = random.integers(classes, size=COUNT)
    drawn = random.integers(classes, size=COUNT)
    return np.where(random.random(COUNT) < 0.66, labels, drawn), labels


def some_flags() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(2, size=(COUNT, 5))
    return np.where(random.random(labels.shape) < 0.8, labels, 1 - labels), labels


def some_numbers() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.normal(size=COUNT)
    return labels + random.normal(size=COUNT), labels


def row_of(
    name: str, pair: tuple[np.ndarray, np.ndarray], expected: Any, by: str
) -> Row:
    from slurmft.train.tasks.metrics import SCORES

    return Row(name, by, abs(SCORES[name](*pair) - float(expected)))


@check("metrics", ROUNDING)
def scores(_: Path) -> Iterator[Row]:
    from scipy import stats
    from sklearn import metrics

    two = some_labels(2)
    six = some_labels(6)
    flags = some_flags()
    numbers = some_numbers()
    # They take the labels first.
    cases = {
        "accuracy": (six, metrics.accuracy_score(*six[::-1])),
        "f1": (two, metrics.f1_score(*two[::-1])),
        "f1_macro": (six, metrics.f1_score(*six[::-1], average="macro")),
        "f1_micro": (flags, metrics.f1_score(*flags[::-1], average="micro")),
        "subset_accuracy": (flags, metrics.accuracy_score(*flags[::-1])),
        "matthews_correlation": (six, metrics.matthews_corrcoef(*six[::-1])),
        "pearson": (numbers, stats.pearsonr(*numbers).statistic),
        "spearman": (numbers, stats.spearmanr(*numbers).statistic),
        "rmse": (numbers, metrics.root_mean_squared_error(*numbers[::-1])),
    }
    differences = [
        row_of(name, pair, expected, "").difference
        for name, (pair, expected) in cases.items()
    ]
    names = ", ".join(cases)
    yield Row(names, "scikit-learn and scipy", max(differences))


@check("metrics", 1e-7, "evaluate")
def scores_of_evaluate(_: Path) -> Iterator[Row]:
    """evaluate rounds numbers to fp32."""
    two = some_labels(2)
    six = some_labels(6)
    flags = some_flags()
    numbers = some_numbers()
    macro = {"average": "macro"}
    cases: list[tuple[str, Any, str, str | None, dict[str, Any]]] = [
        ("accuracy", six, "accuracy", None, {}),
        ("f1", two, "f1", None, {}),
        ("f1_macro", six, "f1", None, macro),
        ("f1_micro", flags, "f1", "multilabel", {"average": "micro"}),
        ("subset_accuracy", flags, "accuracy", "multilabel", {}),
        ("matthews_correlation", six, "matthews_correlation", None, {}),
        ("pearson", numbers, "pearsonr", None, {}),
        ("spearman", numbers, "spearmanr", None, {}),
        ("rmse", numbers, "mse", None, {"squared": False}),
    ]
    for name, pair, script, configuration, arguments in cases:
        predictions, labels = (each.tolist() for each in pair)
        values = by_evaluate(script, predictions, labels, configuration, **arguments)
        # One number, which has a name of its own for some.
        (expected,) = (v for k, v in values.items() if k != "p-value")
        yield row_of(name, pair, expected, f"evaluate's `{script}`")


def by_evaluate(
    name: str,
    predictions: list[Any],
    references: list[Any],
    configuration: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Returns what a metric of evaluate computes; its script is of the hub, or of --evaluate."""
    import evaluate

    evaluate.logging.set_verbosity_error()
    evaluate.logging.disable_progress_bar()
    folder = os.environ.get("EVALUATE_SCRIPTS")
    if folder:
        name = str(Path(folder) / "metrics" / name / f"{name}.py")
    metric = evaluate.load(name, configuration, keep_in_memory=True)
    values: dict[str, Any] = metric.compute(
        predictions=predictions, references=references, **arguments
    )
    return values


# --- words, answers, texts ------------------------------------------------------------------------


def prepared(name: str, data: Path, model: Path, **options: Any) -> tuple[Any, Any]:
    """Returns a task and its data."""
    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.login.sources import localize

    config = TrainConfig.resolve(task=name, data=str(data), model=str(model), **options)
    task = tasks.get(localize(config))
    return task, task.prepare()


def predicted(task: Any, data: Any) -> np.ndarray:
    """Returns what a model of random weights predicts."""
    import torch

    torch.manual_seed(3)
    model = task.model(data).eval()
    batch = data.validation.batch(np.arange(len(data.validation)), data.pad_id)
    with torch.inference_mode():
        evaluated = task.evaluate(model, task.batch(batch, data.validation), data)
    return np.asarray(evaluated.predictions.numpy())


@check("metrics", ROUNDING, "seqeval")
def entities(folder: Path) -> Iterator[Row]:
    """Of 200 texts, whose tags are drawn again for a fifth of their words."""
    import torch
    from seqeval import metrics

    from tests.support.models import write_model, write_words

    source = write_words(folder / "data", train=20, validation=200)
    model = write_model(folder / "model")
    task, data = prepared("token-classification", source, model, metric=("seqeval",))
    task.model(data)
    table = data.validation
    batch = table.batch(np.arange(len(table)), data.pad_id)
    labels = batch.targets["labels"].clamp(min=0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(data.labels), labels.shape, generator=generator)
    is_drawn = torch.rand(labels.shape, generator=generator) < 0.2
    classes = torch.where(is_drawn, drawn, labels)
    logits = torch.nn.functional.one_hot(classes, len(data.labels)).float()
    predictions = task.predict(SimpleNamespace(logits=logits), batch, data).numpy()
    ours = task.compute(predictions, data)
    inputs = task.metric_inputs(predictions, data)[""][0]
    pair = (inputs.references, inputs.predictions)
    assert 0.2 < ours["entity_f1"] < 0.9
    for name in ("f1", "precision", "recall"):
        expected = getattr(metrics, f"{name}_score")(*pair)
        difference = abs(ours[f"entity_{name}"] - float(expected))
        yield Row(f"entity_{name}", "seqeval", difference)


@check("metrics", 1e-11, "evaluate")
def answers(folder: Path) -> Iterator[Row]:
    """The scripts of evaluate have SQuAD's official ones in them. Scores are up to 100."""
    from tests.support.models import write_model, write_squad

    model = write_model(folder / "model", spread=0.3)
    windows = {"max_length": MAX_LENGTH, "doc_stride": STRIDE}
    for preset, script, number in (("v1", "squad", 0), ("v2", "squad_v2", 1)):
        has_none = preset == "v2"
        source = write_squad(folder / preset, train=10, validation=200, none=has_none)
        task, data = prepared("squad", source, model, preset=preset, **windows)
        predictions = predicted(task, data)
        ours = task.compute(predictions, data)
        inputs = task.metric_inputs(predictions, data)[""][number]
        values = by_evaluate(script, inputs.predictions, inputs.references)
        exact = values[{"v1": "exact_match", "v2": "exact"}[preset]]
        by = f"SQuAD's official script, {preset}"
        assert ours["squad_f1"] > 0
        yield Row(f"squad_f1, {preset}", by, abs(ours["squad_f1"] - values["f1"]))
        difference = abs(ours["squad_exact_match"] - exact)
        yield Row(f"squad_exact_match, {preset}", by, difference)


@check("metrics", 1e-10, "rouge_score", "sacrebleu")
def texts(_: Path) -> Iterator[Row]:
    """Of targets whose words have lost one, or have been shuffled. Scores are up to 100."""
    import random

    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    from slurmft.train.tasks import seq2seq
    from tests.support.models import made_text

    draw = random.Random(0)
    targets = [made_text(draw, draw.randint(4, 20)) for _ in range(200)]
    predictions = []
    for target in targets:
        words = target.split()
        draw.choice((draw.shuffle, list.pop))(words)
        predictions.append(" ".join(words))
    pairs = list(zip(predictions, targets, strict=True))
    scored = np.array([seq2seq.scores_of(*pair) for pair in pairs])
    scorer = RougeScorer(seq2seq.ROUGE, use_stemmer=True)
    for place, name in enumerate(seq2seq.ROUGE):
        values = [scorer.score(target, text)[name].fmeasure for text, target in pairs]
        difference = abs(100 * float(scored[:, place].mean() - np.mean(values)))
        yield Row(name, "rouge_score", difference)
    expected = sacrebleu.corpus_bleu(predictions, [targets]).score
    difference = abs(seq2seq.bleu(scored) - expected)
    yield Row("bleu", "sacrebleu", difference)


@check("metrics", 1e-5)
def perplexities(folder: Path) -> Iterator[Row]:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.models import write_decoder, write_documents

    source = write_documents(folder / "data", train=10, validation=40)
    model = write_decoder(folder / "model", initializer_range=0.2)
    task, data = prepared("causal-lm", source, model, max_length=MAX_LENGTH)
    predictions = predicted(task, data)
    ours = task.compute(predictions, data)
    sum_of_losses, count, _ = predictions.sum(axis=0)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    losses = 0.0
    tokens = 0
    table = data.validation
    for begin, end in zip(table.offsets, table.offsets[1:], strict=False):
        block = torch.tensor(table.tokens[None, begin:end].astype(np.int64))
        with torch.inference_mode():
            loss = loaded(block, labels=block).loss
        losses += float(loss) * (block.shape[1] - 1)
        tokens += block.shape[1] - 1
    mean = losses / tokens
    difference = abs(float(sum_of_losses / count) - mean)
    yield Row("eval_loss", "transformers, block by block", difference)
    difference = abs(ours["perplexity"] / float(np.exp(mean)) - 1)
    yield Row("perplexity, relative", "transformers, block by block", difference)
