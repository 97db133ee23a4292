"""Tasks and recipes: the torch-free half of a task, for the login node.

The compute half (rows, features, model, metric) is a module of `slurmft.train.tasks`. A recipe's
value stands until the site file or a flag overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurmft.core.errors import UsageError, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """What the login node knows of a task."""

    module: str
    """Where its compute half is, in `slurmft.train.tasks`: the class `Task`."""
    splits: tuple[str, ...] = ("train", "validation")
    """Its files; none: its data is generated."""
    columns: tuple[str, ...] = ()
    """Those that the files need besides the ones that flags name."""
    labels: tuple[str, ...] | None = None
    """Names of the classes; none: labels are numbers; None: those that the training data has."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Where it has labels: names in `slurmft.train.metrics`, the one that decides which checkpoint
    is the best first."""


EMOTIONS = ("sadness", "joy", "love", "anger", "fear", "surprise")
GLUE_COLUMNS: dict[str, tuple[str, str | None]] = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
"""GLUE's tasks under their names on the hub: the columns of the text and of its pair."""
GLUE_LABELS: dict[str, tuple[str, ...]] = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "stsb": (),
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
    "wnli": ("not_entailment", "entailment"),
}
_GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation",),
    "mrpc": ("f1", "accuracy"),
    "qqp": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
}
"""Of all others: accuracy."""
_SPLITS = {"mnli": ("train", "validation_matched", "validation_mismatched")}

TASKS: dict[str, TaskFacts] = {
    "synthetic": TaskFacts(module="synthetic", splits=()),
    "emotion": TaskFacts(module="sequence", labels=EMOTIONS),
    **{
        task: TaskFacts(
            module="sequence",
            labels=labels,
            metrics=_GLUE_METRICS.get(task, ("accuracy",)),
            splits=_SPLITS.get(task, ("train", "validation")),
        )
        for task, labels in GLUE_LABELS.items()
    },
    "text-classification": TaskFacts(module="sequence", metrics=("accuracy", "f1_macro")),
    "squad": TaskFacts(module="squad", columns=("id", "question", "context", "answers")),
}

_CLASSIFICATION = {
    "preset": "default",
    "model": "distilbert-base-uncased",
    "label_column": "label",
    "max_length": 128,
    "epochs": 3,
    "batch_size": 32,
    "eval_batch_size": 128,
    "learning_rate": 5e-5,
    "warmup_ratio": 0.1,
}
_EMOTION = _CLASSIFICATION | {
    "task": "emotion",
    "data": "dair-ai/emotion",
    "text_column": "text",
    "epochs": 2,
    "batch_size": 64,
    "eval_batch_size": 256,
    "learning_rate": 5e-4,
}
_GLUE: dict[str, dict[str, Any]] = {
    task: _CLASSIFICATION
    | {"task": task, "data": "nyu-mll/glue", "text_column": text}
    | ({"text_pair_column": pair} if pair else {})
    for task, (text, pair) in GLUE_COLUMNS.items()
}
_SQUAD = {
    "task": "squad",
    "preset": "v1",
    "model": "distilbert-base-uncased",
    "data": "rajpurkar/squad",
    "max_length": 384,
    "doc_stride": 128,
    "epochs": 2,
    "batch_size": 32,
    "eval_batch_size": 64,
    "learning_rate": 5e-5,
    "warmup_ratio": 0.1,
}
# What run_glue.py and run_qa.py of transformers' examples do where the article says nothing.
_TRAINER = {"warmup_ratio": 0.0, "weight_decay": 0.0}
_ICE_LAKE = _TRAINER | {
    # The article's distributed commands name this model, its single-node ones bert-base-cased.
    "model": "distilbert-base-uncased",
    "nproc_per_node": 1,
    "max_length": 128,
    "batch_size": 32,
    "learning_rate": 2e-5,
    "epochs": 3,
}

RECIPES: dict[str, dict[str, Any]] = {
    # About a minute on two CPU cores: a small DistilBERT that learns its labels.
    "synthetic": {
        "task": "synthetic",
        "preset": "quick",
        "epochs": 3,
        "batch_size": 32,
        "eval_batch_size": 256,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.1,
    },
    # The sizes and the length distribution of the published benchmark on DistilBERT-base.
    "mn4-benchmark": {
        "task": "synthetic",
        "preset": "paper",
        "epochs": 1,
        "batch_size": 256,
        "eval_batch_size": 2048,
        "learning_rate": 5e-4,
        "warmup_ratio": 0.1,
    },
    "emotion": _EMOTION,
    # A GPU's batch of 256. The schedule warmed up for 100 of the 315 steps that one GPU does; on
    # more of them it advanced faster, so that the fraction stayed.
    "mn4-emotion": _EMOTION
    | {
        "epochs": 5,
        "batch_size": 256,
        "eval_batch_size": 256,
        "learning_rate": 5e-4,
        "warmup_ratio": 100 / 315,
        "precision": "fp16",
    },
    **_GLUE,
    "icelake-mrpc": _GLUE["mrpc"] | _ICE_LAKE,
    "icelake-qqp": _GLUE["qqp"] | _ICE_LAKE,
    "squad": _SQUAD,
    "squad-v2": _SQUAD | {"preset": "v2", "data": "rajpurkar/squad_v2"},
    "spr-squad": _SQUAD
    | _TRAINER
    | {
        "nproc_per_node": 2,
        "batch_size": 32,
        "epochs": 1,
        "learning_rate": 5e-5,  # run_qa.py's; the article names none
        "precision": "bf16",
    },
    "text-classification": _CLASSIFICATION | {"task": "text-classification", "text_column": "text"},
}
"""name -> task, preset, and the values of other flags. The first one of a task, or of a preset of
it, is what it trains by default."""

CHANGES: dict[str, dict[str, Any]] = {
    # As published, accuracy falls from a global batch of 2,048 on: AdamW gets not far enough in the
    # 40 steps that are left. Up to 1,024 nothing changes. Muon holds it in 30 steps, hardly in 20.
    "mn4-emotion": {
        "optimizer": "auto",
        "muon_learning_rate": 2e-3,
        "lr_rule": "linear",
        "reference_batch_size": 1024,
        "max_global_batch_size": 2672,
    },
}
"""Recipe -> what is not as published, because that was found wanting; `--as-published` leaves it
out."""


def named() -> list[str]:
    """The recipes that are more than their task's default."""
    return [name for name in RECIPES if name not in TASKS]


def presets(task: str) -> list[str]:
    """Names of a task's presets, the default one first."""
    return list(dict.fromkeys(r["preset"] for r in RECIPES.values() if r["task"] == task))


def fill(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the recipe that is named, or else is its task's and preset's; over them those
    that are given.

    Raises:
        UsageError: no such recipe, task or preset; or a recipe of another task or preset.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "recipe" not in given:
        return _default(given.get("task", "synthetic"), given.get("preset")) | given
    name = given["recipe"]
    if name not in RECIPES:
        raise unknown("--recipe", name, list(RECIPES))
    for key in ("task", "preset"):
        its = RECIPES[name][key]
        if given.get(key, its) != its:
            raise UsageError(
                f"--recipe {name} has the {key} {its}, not {given[key]}", f"leave out --{key}"
            )
    return RECIPES[name] | ({} if given.get("as_published") else CHANGES.get(name, {})) | given


def _default(task: str, preset: str | None) -> dict[str, Any]:
    if task not in TASKS:
        raise unknown("--task", task, list(TASKS))
    preset = preset or presets(task)[0]
    if preset not in presets(task):
        raise unknown(f"preset of task {task}", preset, presets(task))
    name = next(name for name, r in RECIPES.items() if (r["task"], r["preset"]) == (task, preset))
    return RECIPES[name] | {"recipe": name}
