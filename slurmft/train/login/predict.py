"""Batch inference with the model of a finished run: what its job needs, checked at submission."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.errors import UsageError
from slurmft.core.files import check_place, other_kind, read_json
from slurmft.core.filesystem import absolute
from slurmft.core.hub import is_local
from slurmft.core.options import build, flag, options
from slurmft.core.program import PREDICT, Program, trained_by
from slurmft.core.site import merge, site_defaults
from slurmft.core.text import counted, some
from slurmft.runs import frozen_code
from slurmft.runs.rundir import RunDir
from slurmft.train import own_task
from slurmft.train.config import TrainConfig
from slurmft.train.login import prompts
from slurmft.train.login.cells import describe_rows
from slurmft.train.login.configure import OPTIONS
from slurmft.train.login.formats import format_of
from slurmft.train.login.rows import (
    SQUAD_COLUMNS,
    OptionalColumn,
    check_writable,
    read_columns,
)
from slurmft.train.login.sources import check_installed, check_no_adapter
from slurmft.train.predict_config import NEW_TOKENS, PredictConfig

FILES = (".csv", ".tsv", ".jsonl", ".parquet")
ARRAY = ".npy"
"""Ending of an output that holds vectors alone, one for each row, without the columns."""
COLUMNS = ("prediction", "probability")
"""Columns that predictions add to a file."""
_CHECKED_BYTES = 2**28
"""Of larger files only the first rows are read at submission."""
_GENERATES = "num_beams"
"""Option of a training that says how texts are generated."""


def configure(
    run: RunDir,
    file: Path,
    output: Path | None,
    overwrite: bool,
    flags: dict[str, Any],
    is_agreed: bool = False,
) -> RunConfig:
    """Returns the configuration of a job that predicts the rows of a file.

    Args:
        run: a finished run, or a prediction of its model.
        output: where to write the rows with their predictions; None: NAME.predictions here.
        flags: options of the job and of the prediction, and those of the training that predict has
            a flag for.
        is_agreed: of a run from elsewhere, its user agrees to what this executes without a record
            of that: a dry run.

    Raises:
        UsageError: the run has no model that can predict, the file has not its columns, or another
            file would be overwritten.
    """
    run = trained_run(run)
    train = _trained(run, is_agreed)
    file = absolute(file)
    default_output = f"{file.stem}.predictions{file.suffix}"
    output = absolute(output or default_output)
    _check_files(file, output, overwrite, train)
    values = merge(site_defaults(OPTIONS | options(PredictConfig)), flags)
    predict = build(PredictConfig, values)
    train, predict = _with_flags(train, predict, flags)
    train = dataclasses.replace(train, data=str(file))
    contents = {
        str(file): _describe_rows_of(file, output, train, run.model, predict),
        str(run.model): "model",
    }
    settings: dict[str, Any] = {"output": str(output), "overwrite": overwrite}
    # The run has saved an adapter, which needs the model that it was trained on.
    if train.model != str(run.model):
        settings["adapter"] = str(run.model)
        if is_local(str(train.model)):
            contents[str(train.model)] = "base model"
    trainer = train.program()
    # What a container shows, besides the folder of this run.
    paths = [*contents, str(output.parent)]
    if trainer.code:
        # Its code is executed where it is, and compared with the sums there.
        paths.append(str(run.path))
    program = Program(
        kind=PREDICT,
        name=f"predict-{trainer.name}",
        module=trainer.module,
        needs_hub=not is_local(str(train.model)),
        paths=tuple(paths),
        code=trainer.code,
        inputs=_fingerprints(contents),
        settings=trainer.settings | dataclasses.asdict(predict) | settings,
    )
    job = build(JobConfig, values)
    return RunConfig(program=program, job=with_absolute_paths(job))


def _fingerprints(contents: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns by what the job sees whether a file or model has changed since its submission.

    Args:
        contents: path -> what is there.
    """
    fingerprints = {}
    for path, what in contents.items():
        fingerprints[path] = fingerprint.of(Path(path)) | {"what": what}
    return fingerprints


# --- the model ------------------------------------------------------------------------------------


def trained_run(run: RunDir) -> RunDir:
    """Returns the run that has trained the model of a run, which may be a prediction: the newest
    run often is."""
    program = run.load_config().program
    if program.kind == PREDICT:
        return RunDir.open(Path(trained_by(program.settings)))
    return run


def _trained(run: RunDir, is_agreed: bool) -> TrainConfig:
    """Returns the configuration that a run has trained with, changed to what predicting needs: its
    model is the one to load, below an adapter if the run has saved one.

    Args:
        is_agreed: see `configure`.

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
        path = shlex.quote(str(run.path))
        raise UsageError(problem, f"more about it: slurmft status {path}")
    # A task of the user's own is the copy that its run was trained with. Another user's is refused:
    # it would be executed here.
    if _is_code(program):
        config = run.load_own_config(is_agreed)
        frozen_code.check(run, config)
        program = config.program
    train = TrainConfig.of(program)
    facts = own_task.facts(train.task)
    # No splits: the rows are generated, and a file has none of their kind.
    if not facts.splits:
        raise UsageError(
            f"{where}: slurmft predict knows no rows of --task {train.task}",
            f"load its model by {facts.library}: {run.model}",
        )
    own_task.check_predicts(train.task)
    model = str(run.model)
    if train.saves_adapter:
        model = str(train.model)
        _check_base(model, where, program)
    else:
        check_no_adapter(f"the model of {where}", run.model)
    return dataclasses.replace(_without_training_options(train), model=model)


def executes_code(run: RunDir) -> bool:
    """Returns whether the task of a training is code of the user's own."""
    return _is_code(run.load_config().program)


def _is_code(program: Program) -> bool:
    # Of the program that is used: another look at the file might find another one.
    return bool(program.code) or ":" in str(program.settings.get("task"))


def _check_base(model: str, where: str, program: Program) -> None:
    """Raises UsageError where the model below an adapter is not the one that it was trained on.

    Args:
        where: the run, in messages.
        program: of the run.
    """
    check_installed({"an adapter": ("peft",)})
    if not is_local(model):
        return
    base = f"{where} has an adapter of the model {model!r}"
    folder = Path(model)
    if not (folder / "config.json").is_file():
        problem = f"{base}, which is not there any more"
        raise UsageError(problem, "bring the model back, or train with --merge")
    trained_with = program.inputs.get(model)
    if trained_with and trained_with["sha256"] != fingerprint.of(folder)["sha256"]:
        problem = f"{base}, which has changed since the run was submitted"
        raise UsageError(problem, "bring the model back as it was")


def _without_training_options(train: TrainConfig) -> TrainConfig:
    """Returns a configuration in which the options that only a training has are not set."""
    defaults = {}
    for name, declared in options(TrainConfig).items():
        if declared.predicts == "reset":
            defaults[name] = declared.default
    return dataclasses.replace(train, **defaults)


def saved_config(model: Path) -> dict[str, Any]:
    """Returns the configuration of a saved model, or of the whole model that an adapter is of."""
    # Beside a saved adapter, the folder `config` has that of the whole model.
    return (
        read_json(model / "config.json")
        or read_json(model / "config/config.json")
        or {}
    )


# --- options --------------------------------------------------------------------------------------


def _with_flags(
    train: TrainConfig,
    predict: PredictConfig,
    flags: dict[str, Any],
) -> tuple[TrainConfig, PredictConfig]:
    """Returns both configurations with the flags that were given.

    Raises:
        UsageError: one is for the generation of texts, and the task generates none.
    """
    changes = {}
    for name, declared in options(TrainConfig).items():
        if declared.predicts == "flag" and name in flags:
            changes[name] = flags[name]
    if continues_prompts(train):
        new_tokens = predict.max_new_tokens or NEW_TOKENS
        predict = dataclasses.replace(predict, max_new_tokens=new_tokens)
    elif own_task.facts(train.task).predictions == "texts":
        if predict.generation != "greedy":
            problem = (
                f"--generation is for language models, and --task {train.task} is none"
            )
            raise UsageError(problem, "leave it out; there is --num-beams")
        if predict.max_new_tokens is not None:
            changes["max_target_length"] = predict.max_new_tokens
    else:
        for name in (*options(PredictConfig), _GENERATES):
            if name in flags:
                problem = f"{flag(name)}: --task {train.task} generates no texts"
                raise UsageError(problem, "leave it out")
    return dataclasses.replace(train, **changes), predict


def continues_prompts(train: TrainConfig) -> bool:
    """Returns whether the task is a language model's, which writes behind a prompt."""
    return own_task.facts(train.task).pipeline == "text-generation"


# --- files ----------------------------------------------------------------------------------------


def answers_file(output: Path, train: TrainConfig) -> Path | None:
    """Returns the file of the answers as SQuAD's script reads them; None: the task has none."""
    if own_task.facts(train.task).predictions != "answers":
        return None
    # Behind the whole name: those of new.csv and new.jsonl are two.
    return output.with_name(f"{output.name}.json")


def _check_files(file: Path, output: Path, overwrite: bool, train: TrainConfig) -> None:
    """Raises UsageError where rows cannot be read from `file`, or written to `output`."""
    if not file.is_file():
        hint = "give the rows to predict: .csv, .jsonl"
        problem = f"no such file: {str(file)!r}"
        other = other_kind(file)
        if other:
            problem = f"{str(file)!r} is {other}, and no file"
        raise UsageError(problem, hint)
    outputs: tuple[str, ...] = FILES
    if own_task.facts(train.task).predictions == "vectors":
        outputs = (*FILES, ARRAY)
    for path, forms in ((file, FILES), (output, outputs)):
        if path.suffix not in forms:
            problem = f"{str(path)!r} is none of {', '.join(forms)}"
            raise UsageError(problem, "convert it, or give another --output")
    if not overwrite:
        # The job checks it once more before it writes: it may wait for days.
        check_absent(output, train)


def check_absent(output: Path, train: TrainConfig) -> None:
    """Raises UsageError where a file is there already, or its folder is not."""
    for path in filter(None, (output, answers_file(output, train))):
        if path.exists():
            raise UsageError(
                f"{str(path)!r} exists, and is not overwritten",
                "give another --output, or --overwrite",
            )
    check_place(output, "--output")


def _describe_rows_of(
    file: Path,
    output: Path,
    train: TrainConfig,
    model: Path,
    predict: PredictConfig,
) -> str:
    """Returns a line on the rows of a file, after a check of them; UsageError where it fails."""
    # reading it would take longer than people wait
    most = None
    if file.stat().st_size > _CHECKED_BYTES:
        most = 1
    all_columns = read_columns(file, most=most)
    columns = checked_inputs(train, all_columns, str(file))
    # The job writes these columns again, beside its predictions: here it costs nothing to see that
    # the kind of file has no form for one.
    check_writable(all_columns, output, str(file))
    if most:
        return "large: the job checks its rows"
    if own_task.facts(train.task).predictions == "answers":
        names = _names_of_questions(all_columns)
        questions = zip(names, columns[0], strict=True)
        prompts.check_questions(train, str(model), questions, str(file))
    if continues_prompts(train) and predict.max_new_tokens is not None:
        prompts.check(train, model, columns, str(file), predict.max_new_tokens)
    return counted(len(columns[0]), "row")


def _names_of_questions(columns: dict[str, list[Any]]) -> list[str]:
    """Returns what messages call each question: its row and, where it has one, its id."""
    rows = len(next(iter(columns.values())))
    names = [f"row {row}" for row in range(1, rows + 1)]
    if "id" in columns:
        pairs = zip(names, columns["id"], strict=True)
        names = [f"{row}, the question {name!r}," for row, name in pairs]
    return names


def inputs_of(train: TrainConfig, file: Path) -> list[list[Any]]:
    """Returns the columns of a file that the model reads; see `checked_inputs`."""
    return checked_inputs(train, read_columns(file), str(file))


def checked_inputs(
    train: TrainConfig,
    columns: dict[str, list[Any]],
    where: str,
) -> list[list[Any]]:
    """Returns those columns of a file that the model reads: a text, or two, lists of words, or
    conversations.

    Args:
        columns: all of the file.
        where: the file, in messages.

    Raises:
        UsageError: there are no such columns, or a value in them that cannot be right; or there are
            predictions in the file already.
    """
    # A file with predictions is likely the output of an earlier command.
    for name in COLUMNS:
        if name in columns:
            problem = f"{where!r} has a column {name!r} already"
            raise UsageError(problem, "give it another name")
    form = format_of(train)
    names = form.inputs()
    for name in names:
        if name not in columns and not isinstance(name, OptionalColumn):
            hint = f"it has {some(list(columns))}"
            if name not in SQUAD_COLUMNS:  # whose names are fixed
                hint += "; choose with --text-column, --text-pair-column"
            raise UsageError(f"{where!r} has no column {name!r}", hint)
    if "id" in columns and own_task.facts(train.task).predictions == "answers":
        _check_ids(columns["id"], where)
    inputs = inputs_in(columns, names)
    empty = form.check_inputs(inputs, where)
    if empty:
        rows = f"{len(empty):,} of {len(inputs[0]):,} rows have no text"
        raise UsageError(
            f"{where!r}: {rows}: {describe_rows(empty)}",
            "give them one, or take them out; rows are counted from 1, without the header",
        )
    return inputs


def inputs_in(columns: dict[str, list[Any]], names: tuple[str, ...]) -> list[list[Any]]:
    """Returns columns of a file by their names; one that the file lacks holds None."""
    rows = len(next(iter(columns.values())))
    absent: list[Any] = [None] * rows
    return [columns.get(name, absent) for name in names]


def _check_ids(ids: list[Any], where: str) -> None:
    """Raises UsageError where two questions have one identifier, by which scripts find answers."""
    first_rows: dict[Any, int] = {}
    for row, name in enumerate(map(str, ids), start=1):
        first = first_rows.setdefault(name, row)
        if first != row:
            problem = f"{where!r}: rows {first} and {row} have the id {name!r}"
            raise UsageError(
                problem, "give each question its own, or leave the column out"
            )
