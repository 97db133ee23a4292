"""Batch inference with the model of a finished run: what its job needs, checked at submission."""

import dataclasses
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.config import JobConfig, RunConfig, build, with_absolute_paths
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute
from slurmft.core.program import Program
from slurmft.core.site import merge, site_defaults
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import OPTIONS
from slurmft.train.login.rows import check_texts, no_column, read_columns, row_words
from slurmft.train.task_facts import TASKS

KIND = "predict"
FILES = (".csv", ".tsv", ".jsonl", ".parquet")
COLUMNS = ("prediction", "probability")
"""Those that predictions add to a file."""
_CHECKED_BYTES = 2**28
"""Of larger files only the first rows are read at submission."""
MODULES = ("sequence", "multi_label", "tokens", "seq2seq")
"""Of `slurmft.train.tasks`: those whose results are rows."""


def configure(
    run: RunDir, file: Path, output: Path | None, overwrite: bool, flags: dict[str, Any]
) -> RunConfig:
    """The resolved configuration of a prediction, of the rows of a file.

    Args:
        run: a finished one, or a prediction of its model.
        output: where to write them with their predictions; None: NAME.predictions here.
        flags: options of the job, and eval_batch_size, max_length, precision.

    Raises:
        UsageError: the run has no model that can predict, the file has not its columns, or another
            file would be overwritten.
    """
    program = run.load_config().program
    if program.kind == KIND:  # the newest run is often a prediction: the one that it was made by
        run = RunDir.open(Path(program.settings["model"]).parent)
    train, file = _trained(run), absolute(file)
    output = absolute(output or f"{file.stem}.predictions{file.suffix}")
    if not file.is_file():
        raise UsageError(f"no such file: {str(file)!r}", "give the rows to predict: .csv, .jsonl")
    for path in (file, output):
        if path.suffix not in FILES:
            raise UsageError(f"{str(path)!r} is none of {', '.join(FILES)}", "convert it")
    if not overwrite:
        check_absent(output)
    values = merge(site_defaults(OPTIONS), flags)
    own = {k: v for k, v in flags.items() if k in ("eval_batch_size", "max_length", "precision")}
    train = dataclasses.replace(train, model=str(run.model), data=str(file), **own)
    is_large = file.stat().st_size > _CHECKED_BYTES
    texts = texts_of(train, file, most=1 if is_large else None)
    what = "large: the job checks its rows" if is_large else f"{len(texts[0]):,} rows"
    inputs = {str(file): what, str(run.model): "model"}
    program = Program(
        kind=KIND,
        name=f"predict-{train.task}",
        module="slurmft.train.rank",
        paths=(str(run.model), str(file), str(output.parent)),
        inputs={path: fingerprint.of(Path(path)) | {"what": what} for path, what in inputs.items()},
        settings=train.program().settings | {"output": str(output), "overwrite": overwrite},
    )
    return RunConfig(program=program, job=with_absolute_paths(build(JobConfig, values)))


def check_absent(output: Path) -> None:
    """Raises UsageError where a file is there already, or its folder is not."""
    if output.exists():
        raise UsageError(
            f"{str(output)!r} exists, and is not overwritten",
            "give another --output, or --overwrite",
        )
    if not output.parent.is_dir():
        raise UsageError(f"no such folder: {str(output.parent)!r}", "make it, or change --output")


def _trained(run: RunDir) -> TrainConfig:
    """What a run has trained, as it predicts. UsageError where it has no model, or one that makes
    no predictions of rows."""
    program, state = run.load_config().program, run.get_state().state
    where = repr(str(run.path))
    if program.kind != "train":
        raise UsageError(f"{where} trained no model of slurmft's own tasks", "give another run")
    if state != "finished" or not any(run.model.glob("*.safetensors")):
        why = f"it is {state}" if state != "finished" else "there is none in its model/"
        raise UsageError(f"{where} has no finished model: {why}", "slurmft status RUN says more")
    train = TrainConfig.of(program)
    facts = TASKS.get(train.task)
    if facts is None or not facts.splits or facts.module not in MODULES:
        raise UsageError(
            f"{where}: slurmft predict knows no rows of --task {train.task}",
            f"load its model by transformers: {run.model}",
        )
    if train.saves_adapter:
        raise UsageError(f"{where} saved an adapter, not a whole model", "train it with --merge")
    plain: dict[str, Any] = dict.fromkeys(("lora", "epochs", "max_steps", "dropout"))
    off = ("cpu_offload", "activation_checkpointing", "merge", "load_in_4bit")
    plain |= dict.fromkeys(off, False) | {"shard": "none"}
    return dataclasses.replace(train, **plain)


def texts_of(train: TrainConfig, file: Path, most: int | None = None) -> list[list[Any]]:
    """The columns of a file that the model reads: a text, or two, or lists of words; of the first
    `most` thousands of rows, where that is given.

    Raises:
        UsageError: there are no such columns, or a value in them that cannot be right; or there are
            predictions in the file already.
    """
    columns, where = read_columns(file, most=most), str(file)
    for name in COLUMNS:
        if name in columns:
            raise UsageError(f"{where!r} has a column {name!r} already", "give it another name")
    wanted = [name for name in (train.text_column, train.text_pair_column) if name]
    for name in wanted:
        if name not in columns:
            raise no_column(where, name, list(columns))
    found = [columns[name] for name in wanted]
    if TASKS[train.task].module != "tokens":
        for values in found:
            check_texts(values, where)
    elif wrong := [i for i, words in enumerate(found[0], 1) if not _are_words(words)]:
        raise UsageError(f"{where!r}: no list of words: {row_words(wrong)}", '["Ada", "slept"]')
    return found


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(w, str) for w in value)
