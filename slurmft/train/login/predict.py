"""Batch inference with the model of a finished run: what its job needs, checked at submission."""

import dataclasses
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.errors import UsageError
from slurmft.core.files import check_place
from slurmft.core.filesystem import absolute
from slurmft.core.options import build, options
from slurmft.core.program import PREDICT, Program
from slurmft.core.site import merge, site_defaults
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login.cells import check_texts, describe_rows
from slurmft.train.login.configure import OPTIONS
from slurmft.train.login.rows import no_column, read_columns
from slurmft.train.task_facts import TASKS, module_name

FILES = (".csv", ".tsv", ".jsonl", ".parquet")
COLUMNS = ("prediction", "probability")
"""Columns that predictions add to a file."""
MODULES = ("sequence", "multi_label", "tokens", "seq2seq")
"""Modules of `slurmft.train.tasks` whose results are rows."""
_CHECKED_BYTES = 2**28
"""Of larger files only the first rows are read at submission."""


def configure(
    run: RunDir,
    file: Path,
    output: Path | None,
    overwrite: bool,
    flags: dict[str, Any],
) -> RunConfig:
    """Returns the configuration of a job that predicts the rows of a file.

    Args:
        run: a finished run, or a prediction of its model.
        output: where to write the rows with their predictions; None: NAME.predictions here.
        flags: options of the job, and those of the training that predict has a flag for.

    Raises:
        UsageError: the run has no model that can predict, the file has not its columns, or another
            file would be overwritten.
    """
    program = run.load_config().program
    # the newest run is often a prediction: take the run of its model
    if program.kind == PREDICT:
        run = RunDir.open(Path(program.settings["model"]).parent)
    train = _trained(run)
    file = absolute(file)
    default_output = f"{file.stem}.predictions{file.suffix}"
    output = absolute(output or default_output)
    _check_files(file, output, overwrite)
    changes = {}
    for name, declared in options(TrainConfig).items():
        if declared.predicts == "flag" and name in flags:
            changes[name] = flags[name]
    changes |= {"model": str(run.model), "data": str(file)}
    train = dataclasses.replace(train, **changes)
    contents = {
        str(file): _describe_rows_of(file, train),
        str(run.model): "model",
    }
    # By the fingerprints the job sees whether file or model has changed since its submission.
    inputs = {}
    for path, what in contents.items():
        inputs[path] = fingerprint.of(Path(path)) | {"what": what}
    settings = train.program().settings
    settings = settings | {"output": str(output), "overwrite": overwrite}
    program = Program(
        kind=PREDICT,
        name=f"predict-{train.task}",
        module="slurmft.train.rank",
        paths=(str(run.model), str(file), str(output.parent)),
        inputs=inputs,
        settings=settings,
    )
    job_values = merge(site_defaults(OPTIONS), flags)
    job = build(JobConfig, job_values)
    return RunConfig(program=program, job=with_absolute_paths(job))


def _trained(run: RunDir) -> TrainConfig:
    """Returns the configuration that a run has trained with, changed to what predicting needs.

    Raises:
        UsageError: the run has no model, or one that makes no predictions of rows.
    """
    program = run.load_config().program
    where = repr(str(run.path))
    if program.kind != "train":
        problem = f"{where} trained no model of slurmft's own tasks"
        raise UsageError(problem, "give another run")
    state = run.get_state().state
    if state != "finished":
        reason = f"it is {state}"
    elif not any(run.model.glob("*.safetensors")):
        reason = "there is none in its model/"
    else:
        reason = ""
    if reason:
        problem = f"{where} has no finished model: {reason}"
        raise UsageError(problem, "slurmft status RUN says more")
    train = TrainConfig.of(program)
    facts = TASKS.get(train.task)
    # None: a task of the user's own, whose predictions may be of any kind. No splits: the rows are
    # generated, and a file has none of their kind.
    if facts is None or not facts.splits or module_name(train.task) not in MODULES:
        raise UsageError(
            f"{where}: slurmft predict knows no rows of --task {train.task}",
            f"load its model by transformers: {run.model}",
        )
    if train.saves_adapter:
        problem = f"{where} saved an adapter, not a whole model"
        raise UsageError(problem, "train it with --merge")
    return _without_training_options(train)


def _without_training_options(train: TrainConfig) -> TrainConfig:
    """Returns a configuration in which the options that only a training has are not set."""
    defaults = {}
    for name, declared in options(TrainConfig).items():
        if declared.predicts == "reset":
            defaults[name] = declared.default
    return dataclasses.replace(train, **defaults)


def _check_files(file: Path, output: Path, overwrite: bool) -> None:
    """Raises UsageError where rows cannot be read from `file`, or written to `output`."""
    if not file.is_file():
        hint = "give the rows to predict: .csv, .jsonl"
        raise UsageError(f"no such file: {str(file)!r}", hint)
    for path in (file, output):
        if path.suffix not in FILES:
            forms = ", ".join(FILES)
            raise UsageError(f"{str(path)!r} is none of {forms}", "convert it")
    if not overwrite:
        # The job checks it once more before it writes: it may wait for days.
        check_absent(output)


def check_absent(output: Path) -> None:
    """Raises UsageError where a file is there already, or its folder is not."""
    if output.exists():
        raise UsageError(
            f"{str(output)!r} exists, and is not overwritten",
            "give another --output, or --overwrite",
        )
    check_place(output, "--output")


def _describe_rows_of(file: Path, train: TrainConfig) -> str:
    """Returns a line on the rows of a file, after a check of them; UsageError where it fails."""
    # reading it would take longer than people wait
    if file.stat().st_size > _CHECKED_BYTES:
        texts_of(train, file, most=1)
        return "large: the job checks its rows"
    columns = texts_of(train, file)
    return f"{len(columns[0]):,} rows"


def texts_of(
    train: TrainConfig,
    file: Path,
    most: int | None = None,
) -> list[list[Any]]:
    """Returns the columns of a file that the model reads: a text, or two, or lists of words.

    Args:
        most: thousands of rows to read; None: all.

    Raises:
        UsageError: there are no such columns, or a value in them that cannot be right; or there are
            predictions in the file already.
    """
    columns = read_columns(file, most=most)
    where = str(file)
    # A file with predictions is likely the output of an earlier command.
    for name in COLUMNS:
        if name in columns:
            problem = f"{where!r} has a column {name!r} already"
            raise UsageError(problem, "give it another name")
    texts = []
    for name in filter(None, (train.text_column, train.text_pair_column)):
        if name not in columns:
            raise no_column(where, name, list(columns))
        texts.append(columns[name])
    if module_name(train.task) == "tokens":
        _check_words(texts[0], where)
    else:
        for values in texts:
            check_texts(values, where)
    return texts


def _check_words(values: list[Any], where: str) -> None:
    wrong_rows = []
    for row, words in enumerate(values, start=1):
        # A text without words has no place for a prediction.
        is_list = isinstance(words, list) and words
        if not is_list or not all(isinstance(word, str) for word in words):
            wrong_rows.append(row)
    if wrong_rows:
        fact = f"{where!r}: no list of words: {describe_rows(wrong_rows)}"
        raise UsageError(fact, '["Ada", "slept"]')
