"""A prediction, as one rank runs it: an evaluation of rows without labels, by another head.

Like a training it stops, saves and resumes; its samples are the rows of a file.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmft.core.errors import UsageError
from slurmft.core.files import named_by_user, write_json
from slurmft.core.options import build
from slurmft.core.text import counted
from slurmft.job import Job
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.formats import format_of
from slurmft.train.login.predict import (
    ARRAY,
    answers_file,
    check_absent,
    continues_prompts,
    inputs_in,
    inputs_of,
    saved_config,
)
from slurmft.train.login.prompts import check_room
from slurmft.train.login.rows import read_columns, write_rows
from slurmft.train.loop import checkpoint as checkpoints
from slurmft.train.loop.checkpoint import Saver
from slurmft.train.loop.checkpointing import Checkpointing, Stopped
from slurmft.train.loop.evaluator import Evaluator
from slurmft.train.loop.learner import make_accelerator
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.out_of_memory import answered, of_host_too
from slurmft.train.loop.position import Position
from slurmft.train.loop.saving import PatientSave
from slurmft.train.loop.setup import Setup, has_finished
from slurmft.train.loop.state import Part
from slurmft.train.loop.timers import PhaseClock
from slurmft.train.predict.heads import Kind, kind_of
from slurmft.train.predict_config import NEW_TOKENS, PredictConfig
from slurmft.train.tasks import Evaluated, Task

_RECORD_EVERY_S = 1.0
"""Time between two records of the progress."""
_RESULT_BYTES = 2**14
"""Room that the result takes, about: for the message of a full disk."""


def run(job: Job) -> None:
    """Predicts the rows that are left, and writes all with their predictions. An agreed stop ends
    it before its end; what is predicted is saved then."""
    if has_finished(job):
        return
    checkpoint = checkpoints.newest(job, job.join())
    setup = Setup.prepare(job, checkpoint, fill_tokens)
    settings = job.config.program.settings
    kind = kind_of(setup.task, setup.data, build(PredictConfig, settings))
    loaded = LoadedModel(
        setup, adapter=settings.get("adapter"), pads_left=kind.pads_left
    )
    # It moves the model to its device, and lets it compute in the run's precision.
    make_accelerator(setup).prepare_model(loaded.model, evaluation_mode=True)
    head = RowsHead(setup, kind)
    clock = PhaseClock(setup.world.device)
    position = Position(phase="evaluate")
    evaluator = Evaluator(setup, loaded, head, clock, note_progress=head.note_progress)
    parts: dict[str, Part] = {"position": position, "evaluator": evaluator}
    checkpointing = Checkpointing(setup, Saver(job, setup.world), parts)
    if checkpoint:
        checkpointing.restore(checkpoint)
        head.before = evaluator.done
        job.say(f"{head.before:,} of {head.rows:,} rows were predicted before")
    try:
        with of_host_too():
            values = evaluator.predictions(setup.data, checkpointing.stop_or_save)
        predicted = head.rows - head.before
        finish(setup, kind, values, predicted, clock.seconds["evaluate"])
    except Stopped:
        checkpointing.save_last()
    except torch.OutOfMemoryError as error:
        raise answered(
            error, setup, loaded, position, evaluator.most_samples
        ) from error


class RowsHead:
    """The head of a prediction."""

    def __init__(self, setup: Setup, kind: Kind) -> None:
        self.prediction_shape = kind.shape
        self.prediction_dtype = np.dtype(kind.dtype)
        self.rows = len(setup.data.validation)
        self.before = 0
        """Rows that were predicted before a resume."""
        self._kind = kind
        self._task = setup.task
        self._job = setup.job
        self._world_size = setup.world.size
        self._recorded_at = 0.0
        self._recorded = 0

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        # A task that generates would add targets, which the rows do not have.
        if self._kind.generates:
            return batch
        return self._task.batch(batch, table)

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        return Evaluated(self._kind.predict(model, batch, data))

    def note_progress(self, done: int, total: int) -> None:
        """Records how far the prediction is: a step is a row."""
        now = time.monotonic()
        if now - self._recorded_at < _RECORD_EVERY_S and done != total:
            return
        # The other ranks are about as far.
        left = self.rows - self.before
        samples = min(done * self._world_size, left)
        # The speed is that of this attempt, the place that of all.
        new_samples = samples - self._recorded
        self._job.step(self.before + samples, self.rows, samples=new_samples)
        self._recorded_at = now
        self._recorded = samples


def fill_tokens(folder: Path, task: Task, job: Job) -> None:
    """Writes the tokens of the file's rows. The training table has those that the model is tried
    out with."""
    config = task.config
    settings = job.config.program.settings
    # Of an adapter: its base model has other labels.
    model = Path(settings.get("adapter") or str(config.model))
    model_config = saved_config(model)
    id2label = model_config.get("id2label") or {}
    labels = []
    # A task with no labels at all predicts numbers; transformers' configuration names two anyway.
    if task.facts.labels != ():
        # By number: JSON has the keys as texts, of which "10" comes before "2".
        for number in range(len(id2label)):
            labels.append(id2label[str(number)])
    of_texts: Any = task
    tokenizer = of_texts.tokenizer()
    inputs = inputs_of(config, Path(str(config.data)))
    table = of_texts.unlabelled(tokenizer, inputs)
    if continues_prompts(config):
        predict = build(PredictConfig, settings)
        _check_prompts(of_texts, tokenizer, table, predict)
    tokens = TokenData(
        train=table.few(),
        validation=table,
        labels=labels,
        label_type=str(model_config.get("label_type", "str")),
        pad_id=tokenizer.pad_token_id,
        texts=[],
        warnings=tuple(of_texts.warnings),
    )
    tokens.save(folder)
    task.save_tokenizer(folder / "tokenizer")


def _check_prompts(
    task: Any,
    tokenizer: Any,
    table: TokenTable,
    predict: PredictConfig,
) -> None:
    """Raises UsageError where a prompt is too long."""
    lengths = np.diff(table.offsets)
    # What cures the longest one cures all.
    longest = int(lengths.argmax())
    check_room(
        f"row {longest + 1}",
        int(lengths[longest]),
        predict.max_new_tokens or NEW_TOKENS,
        min(task.positions, tokenizer.model_max_length),
        task.config.max_length,
    )


def finish(
    setup: Setup,
    kind: Kind,
    values: np.ndarray | None,
    predicted: int,
    seconds: float,
) -> None:
    """Writes the rows with their predictions, and the result. Raises as `PatientSave.run`.

    Args:
        values: all predictions, on the main rank.
        predicted: rows that this attempt predicted.
        seconds: how long that took.
    """
    job = setup.job
    world = setup.world
    settings = job.config.program.settings
    source = Path(str(setup.config.data))
    output = Path(settings["output"])
    # A job that resumed when all rows were predicted has spent no time on them.
    speed = None
    if seconds:
        speed = predicted / seconds

    def check_output() -> None:
        # Submission checked it, but the job may have waited for days.
        if not settings["overwrite"]:
            check_absent(output, setup.config)

    facts = {
        "task": setup.config.task,
        "output": str(output),
        "precision": setup.precision,
        "backend": world.backend,
        "phases_s": {"evaluate": seconds},
        # Of a row there may be several samples: windows of a long text.
        "steps": len(setup.data.validation),
        "evaluate_samples_per_s": speed,
    }
    # The rows and as much again for what is predicted of them: only for the message of a full disk.
    size_bytes = 2 * source.stat().st_size
    world.on_main(check_output)
    write = partial(_write, setup, kind, values)
    PatientSave(job, world, "the predictions", size_bytes).run(write)
    # The result is last: a run that has one has finished.
    PatientSave(job, world, "the result", _RESULT_BYTES).run(lambda: job.result(facts))
    world.on_main(job.remove_checkpoints)


def _write(setup: Setup, kind: Kind, values: np.ndarray | None) -> None:
    """Writes the rows with their predictions; on the main rank, which has the values."""
    assert values is not None
    source = Path(str(setup.config.data))
    output = Path(setup.job.config.program.settings["output"])
    columns = read_columns(source)
    inputs = inputs_in(columns, format_of(setup.config).inputs())
    predictions = kind.columns(inputs, values)
    for name in predictions.keys() & columns.keys():
        problem = f"{str(source)!r} has a column {name!r} already"
        raise UsageError(problem, "give it another name")
    answers = answers_file(output, setup.config)
    if answers and "id" in columns:
        write_answers(answers, columns["id"], predictions["prediction"])
    if output.suffix == ARRAY:
        columns = {}
    write_rows(output, columns | predictions, source)
    setup.job.say(f"{counted(len(inputs[0]), 'row')} with predictions: {output}")


def write_answers(file: Path, ids: Iterable[Any], answers: Iterable[str]) -> None:
    """Writes answers as the official script of SQuAD reads them: id -> text."""
    pairs = zip(map(str, ids), answers, strict=True)
    write_json(named_by_user(file), dict(pairs))
