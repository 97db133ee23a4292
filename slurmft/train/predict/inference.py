"""Batch inference as one rank runs it: the evaluation of the trainer, on rows without labels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmft.core.files import read_json
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.predict import check_absent, texts_of
from slurmft.train.login.rows import read_columns, write_rows
from slurmft.train.loop.checkpoint import Saver, Snapshot, copied
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.resume import checkpoint_suffix
from slurmft.train.loop.saving import save_patiently
from slurmft.train.loop.state import Predicted
from slurmft.train.loop.timers import PhaseClock
from slurmft.train.loop.trainer import Training
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.tokens import entities

_RECORD_EVERY_S = 1.0


class Prediction(Training):
    """One rank's part of a prediction. Its samples are the rows of the file."""

    def work(self) -> None:
        """Predicts, and writes the rows with their predictions."""
        self._write_rows(self._all_predictions(self.data))

    def _fill_tokens(self, folder: Path) -> None:
        """Those of the file. The training table is one that nobody reads."""
        model, file = Path(str(self.config.model)), Path(str(self.config.data))
        known = (read_json(model / "config.json") or {}).get("id2label") or {}
        labels = [known[str(i)] for i in range(len(known))] if self.task.facts.labels != () else []
        task: Any = self.task
        tokenizer = task.tokenizer()
        table = task.unlabelled(tokenizer, texts_of(self.config, file))
        first = TokenTable.build([table.tokens[: table.offsets[1]]], [0])
        told, pad_id = tuple(task.warnings), tokenizer.pad_token_id
        TokenData(first, table, labels, pad_id, texts=[], warnings=told).save(folder)
        self.task.save_tokenizer(folder / "tokenizer")

    def build(self, checkpoint: Snapshot | None) -> None:
        """The model, which does not train; and what is to come out of it."""
        self.clock, self.saver = PhaseClock(self.world.device), Saver(self.job)
        self.loaded = LoadedModel(self, trims=False)
        self.accelerator.prepare_model(self.loaded.model, evaluation_mode=True)
        self.position.phase = "evaluate"
        self.kind = _kind(self.task, self.data)
        vars(self.task).update(
            evaluate=self.kind.evaluate,
            batch=lambda batch, table: batch,
            prediction_shape=self.kind.shape,
            prediction_dtype=np.dtype(self.kind.dtype),
        )
        self._told_s, self._told, self._left = 0.0, 0, len(self.data.validation)

    def restore(self, checkpoint: Snapshot) -> None:
        self.predicted = [Predicted.from_tensors(checkpoint.tensors["predicted"])]
        count = len(self.predicted[0].samples)
        self._left -= count
        self.job.say(f"{count:,} of {len(self.data.validation):,} rows were predicted before")

    def _snapshot(self, is_best: bool = False) -> Snapshot | None:
        """What is predicted by now, on the main rank."""
        parts = self.world.gather_objects(Predicted.union(self.predicted))
        if not self.world.is_main:
            return None
        whole = Predicted.union(parts)
        state = {"step": 0, "shard": "none", "tokens_sha256": self.tokens_sha256}
        suffix = checkpoint_suffix(self.position, len(whole.samples))
        return Snapshot(suffix, state, copied({"predicted": whole.tensors()}))

    def _note_progress(self, done: int, total: int) -> None:
        """Records how far it is: a step is a row."""
        rows, now = len(self.data.validation), time.monotonic()
        if now - self._told_s >= _RECORD_EVERY_S or done == total:
            before = rows - self._left
            samples = min(done * self.world.size, self._left)
            self.job.step(before + samples, rows, samples=samples - self._told)
            self._told_s, self._told = now, samples

    def _write_rows(self, values: np.ndarray | None) -> None:
        """Writes the rows with their predictions."""
        settings = self.job.config.program.settings
        source, output = Path(str(self.config.data)), Path(settings["output"])

        def write() -> None:
            assert values is not None  # on the main rank
            if not settings["overwrite"]:
                check_absent(output)
            columns = read_columns(source)
            texts = columns[str(self.config.text_column)]
            write_rows(output, columns | self.kind.columns(texts, values))

        save_patiently(self, "the predictions", 2 * source.stat().st_size, write)
        rows, seconds = len(self.data.validation), self.clock.seconds["evaluate"]
        facts = {
            "task": self.config.task,
            "output": str(output),
            "precision": self.precision,
            "backend": self.world.backend,
            "phases_s": {"evaluate": seconds},
            "steps": rows,
            "evaluate_samples_per_s": self._left / seconds if seconds else None,
        }
        save_patiently(self, "the result", 2**14, lambda: self.job.result(facts))
        self.job.say(f"{rows:,} rows with predictions: {output}")
        self.world.on_main(self.job.remove_checkpoints)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is predicted of a row, as numbers and as columns of a file."""

    shape: tuple[int, ...]
    dtype: type
    evaluate: Callable[[Any, Batch, TokenData], Any]
    """Of a batch: (batch, *shape)."""
    columns: Callable[[Sequence[Any], np.ndarray], dict[str, list[Any]]]
    """Of the texts of all rows, and what is predicted of them."""


def _kind(task: Any, data: TokenData) -> Kind:
    module = TASKS[task.config.task].module
    if module == "multi_label":
        several = partial(_several, data.labels)
        return Kind((len(data.labels),), np.float64, _probabilities, several)
    if module == "tokens":
        most = int(data.validation.label_counts.max())  # type: ignore[union-attr]
        return Kind((most,), np.int64, partial(_words, most), partial(_entities, data.labels))
    if module == "seq2seq":
        most, words = task.config.max_target_length + 1, task._words
        return Kind((most,), np.int64, partial(_generated, most, words), partial(_texts, words))
    if not data.labels:
        return Kind((), np.float64, _numbers, lambda _, v: {"prediction": v.tolist()})
    return Kind((2,), np.float64, _best, partial(_classes, data.labels))


def _best(model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
    best = model(**batch.inputs).logits.double().softmax(-1).max(-1)
    return torch.stack([best.indices.double(), best.values], 1)


def _classes(names: list[str], _: Any, values: np.ndarray) -> dict[str, list[Any]]:
    return {
        "prediction": [names[int(i)] for i in values[:, 0]],
        "probability": values[:, 1].round(6).tolist(),
    }


def _numbers(model: Any, batch: Batch, data: TokenData) -> Any:
    return model(**batch.inputs).logits.squeeze(-1).double()


def _probabilities(model: Any, batch: Batch, data: TokenData) -> Any:
    return model(**batch.inputs).logits.double().sigmoid()


def _several(names: list[str], _: Any, values: np.ndarray) -> dict[str, list[Any]]:
    chosen = [np.flatnonzero(row >= 0.5).tolist() for row in values]
    return {
        "prediction": [[names[i] for i in own] for own in chosen],
        "probability": [
            [round(float(row[i]), 6) for i in own] for row, own in zip(values, chosen, strict=True)
        ],
    }


def _words(most: int, model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
    """The label of each word; -1 behind the last."""
    logits = model(**batch.inputs).logits.flatten(0, -2)
    is_first = batch.targets["labels"].flatten() != IGNORED
    chosen = logits[is_first].argmax(-1).cpu()
    counts = data.validation.label_counts[batch.indices].tolist()  # type: ignore[index]
    found = torch.full((len(counts), most), -1)
    for row, own in enumerate(chosen.split(counts)):
        found[row, : len(own)] = own
    return found


def _entities(names: list[str], rows: Sequence[Any], values: np.ndarray) -> dict[str, list[Any]]:
    found = []
    for words, own in zip(rows, values, strict=True):
        spans = entities([names[i] for i in own if i >= 0])
        found.append(
            [
                {"entity": kind, "first": a, "last": b, "text": " ".join(words[a : b + 1])}
                for kind, a, b in spans
            ]
        )
    return {"prediction": found}


def _generated(most: int, words: Any, model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
    """Tokens of each text, with padding behind them."""
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    tokens = model.generate(**inputs)
    return torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=words.pad_token_id)


def _texts(words: Any, _: Any, values: np.ndarray) -> dict[str, list[Any]]:
    return {"prediction": words.batch_decode(values, skip_special_tokens=True)}
