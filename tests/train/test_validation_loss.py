"""The loss of an evaluation: that of transformers' Trainer, for the same weights and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED
from slurmft.train.data.token_data import TokenData
from slurmft.train.loop.evaluator import LossSum
from tests.support.models import (
    write_copies,
    write_decoder,
    write_documents,
    write_emotion,
    write_model,
    write_seq2seq_model,
    write_words,
)

MAKERS: dict[str, Any] = {
    "emotion": (write_model, write_emotion),
    "token-classification": (write_model, write_words),
    "causal-lm": (write_decoder, write_documents),
    "seq2seq": (write_seq2seq_model, write_copies),
}


def task_of(name: str, folder: Path, smoothing: float) -> Any:
    write_the_model, write_the_data = MAKERS[name]
    given = {
        "data": str(write_the_data(folder / "data", 40, 21)),
        "model": str(write_the_model(folder / "model")),
        "label_smoothing": smoothing,
        "max_length": 16,
    }
    if name == "seq2seq":
        given |= {"max_target_length": 8}
    return tasks.get(TrainConfig.resolve(task=name, **given))


def mean_loss(task: Any, data: TokenData, model: Any) -> float:
    """That of all batches of an evaluation, the last of which has fewer samples."""
    table = data.validation
    losses = LossSum()
    for samples in np.array_split(np.arange(len(table)), 4):
        batch = task.batch(table.batch(samples, data.pad_id), table)
        with torch.inference_mode():
            losses.add(task.evaluate(model, batch, data))
    total, terms = losses.numbers()
    assert terms == task.count(table, np.arange(len(table)))
    return total / terms


def by_trainer(
    task: Any, data: TokenData, model: Any, smoothing: float, folder: Path
) -> float:
    """Trainer's `eval_loss`, of one batch: of several it is the mean of their means."""
    table = data.validation
    everything = task.batch(table.batch(np.arange(len(table)), data.pad_id), table)
    labels = everything.targets["labels"]
    if task.config.task == "causal-lm":  # the model shifts them itself
        first = torch.full((len(labels), 1), IGNORED)
        labels = torch.cat([first, labels], 1)
    inputs = everything.inputs | {"labels": labels}
    inputs.pop("logits_to_keep", None)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            per_device_eval_batch_size=len(table),
            label_smoothing_factor=smoothing,
            prediction_loss_only=True,
            use_cpu=True,
            report_to=[],
        ),
        eval_dataset=[{"row": row} for row in range(len(table))],
        data_collator=lambda rows: inputs,
    )
    trainer.label_names = ["labels"]
    trainer.args.remove_unused_columns = False
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize(
    ("name", "smoothing"),
    [
        *((name, 0.0) for name in MAKERS),
        *((name, 0.2) for name in ("emotion", "seq2seq", "causal-lm")),
    ],
)
def test_loss_is_that_of_the_trainer(
    name: str, smoothing: float, tmp_path: Path
) -> None:
    task = task_of(name, tmp_path, smoothing)
    data = task.prepare()
    model = task.model(data).eval()
    expected = by_trainer(task, data, model, smoothing, tmp_path / "trainer")
    assert mean_loss(task, data, model) == pytest.approx(expected, rel=1e-5)


def test_an_encoder_computes_once(tmp_path: Path) -> None:
    """Of a model that generates by beams; texts and their scores are those without a loss."""
    task = task_of("seq2seq", tmp_path, 0.0)
    data = task.prepare()
    model = task.model(data).eval()
    model.generation_config.num_beams = 3
    calls: list[int] = []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    batch = task.batch(
        data.validation.batch(np.arange(5), data.pad_id), data.validation
    )
    with torch.inference_mode():
        task.evaluate(model, batch, data)
    assert calls == [1]
