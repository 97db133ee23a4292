"""`slurmft predict`: rows of a file, predicted by the model of a finished run."""

from __future__ import annotations

import csv
import datetime
import errno
import itertools
import json
import os
import shutil
import signal
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas  # type: ignore[import-untyped]
import pyarrow
import pyarrow.parquet
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import build, options
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train import tasks
from slurmft.train.config import ResolvedConfig, TrainConfig
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine import lora
from slurmft.train.login.predict import configure, inputs_of
from slurmft.train.login.rows import check_writable, read_columns, write_rows
from slurmft.train.predict.heads import kind_of
from slurmft.train.predict.prediction import fill_tokens
from slurmft.train.predict_config import PredictConfig
from slurmft.train.tasks.metrics import squad
from tests.conftest import Done, Following, assert_two_lines, slurmft
from tests.support import until
from tests.support.made_runs import write_run, write_trained
from tests.support.models import (
    LABELS,
    write_many_labels,
    write_model,
    write_seq2seq_model,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_resume import one_rank
from tests.train.test_trainer import emotion, train


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    folder = tmp_path_factory.mktemp("trained")
    done = train(
        folder, *emotion(tiny_data, tiny_model), "--precision", "fp32", "--epochs", "1"
    )
    assert done.code == 0, done.err
    return done


class Predicting(Following):
    command = "predict"


def predict(run: RunDir, file: Path, *flags: str) -> Done:
    return slurmft(
        *("predict", str(run.path), str(file), "--cluster", "local", "--follow"),
        *("--runs-dir", str(run.path.parent), *flags),
        imported=True,
    )


def predicted(config: RunConfig, folder: Path) -> dict[str, list[Any]]:
    """The columns that a job adds to its file, computed in this process, in one batch.

    Args:
        folder: where the job would keep its tokens.
    """
    settings = config.program.settings
    task = tasks.get(ResolvedConfig.of(config.program))
    job: Any = SimpleNamespace(config=config)
    fill_tokens(folder, task, job)
    data = TokenData.load(folder)
    kind = kind_of(task, data, build(PredictConfig, settings))
    model = task.model(data)
    if "adapter" in settings:
        lora.attach(model, settings["adapter"])
    table = data.validation
    samples = np.arange(len(table))
    batch = table.batch(samples, data.pad_id, left=bool(kind.pads_left))
    if not kind.generates:
        batch = task.batch(batch, table)
    with torch.no_grad():
        values = kind.predict(model.eval(), batch, data)
    inputs = inputs_of(task.config, Path(settings["data"]))
    return kind.columns(inputs, values.numpy())


def texts(data: Path, most: int = 10**6) -> list[str]:
    lines = (data / "validation.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines][:most]


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    write_rows(path, columns)
    return path


@pytest.mark.processes
def test_predictions_are_those_of_the_model(
    trained: Done, tmp_path: Path, tiny_data: Path
) -> None:
    """On two nodes; the file's columns stay."""
    own = texts(tiny_data)
    file = write(tmp_path / "new.csv", {"id": list(range(len(own))), "text": own})
    done = predict(
        trained.run, file, "--nodes", "2", "--output", str(tmp_path / "out.csv")
    )
    assert done.code == 0, done.err
    with open(tmp_path / "out.csv") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == ["id", "text", "prediction", "probability"]
    assert [row["id"] for row in rows] == [str(i) for i in range(len(own))]
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(trained.run.path / "model"))
    for row, expected in zip(rows, classify(own), strict=True):
        assert row["prediction"] == expected["label"]
        assert float(row["probability"]) == pytest.approx(expected["score"], abs=1e-4)
    assert f"predictions  {tmp_path / 'out.csv'}" in done.out
    assert done.run.checkpoint_names() == []
    # by the same model
    again = predict(done.run, file, "--output", str(tmp_path / "out.csv"))
    assert_two_lines(again, "exists, and is not overwritten")
    report = slurmft("report", str(done.run.path.parent)).out
    assert "accuracy" in report
    assert str(trained.run.path / "model") not in report


@pytest.mark.extra("training")
def test_stop_and_resume(trained: Done, tmp_path: Path, tiny_data: Path) -> None:
    """What was predicted before a stop is not predicted again; the file is the same."""
    own = texts(tiny_data) * 30
    file = write(tmp_path / "new.jsonl", {"text": own})
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert predict(trained.run, file, "--output", str(whole)).code == 0
    job = Predicting(
        *(str(trained.run.path), str(file), "--cluster", "local", "--nodes", "2"),
        *("--eval-batch-size", "1"),
        *("--output", str(parts), "--runs-dir", str(tmp_path / "runs")),
        imported=True,
    )
    reader = RecordReader(job.run.records)
    until(lambda: any(r["step"] > 50 for r in reader.read_values("step")), every_s=0.01)
    os.kill(one_rank(job.run), signal.SIGTERM)
    code, text = job.end()
    assert code == 0, text
    assert (
        "rows were predicted before" in (job.run.path / "logs/rank-000.log").read_text()
    )
    assert parts.read_text() == whole.read_text()


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_files_are_read_as_they_are_written(suffix: str, tmp_path: Path) -> None:
    columns = {"text": ['a, "b"', "c\td\ne", "é"], "number": ["1", "2", "3"]}
    assert read_columns(write(tmp_path / f"file.{suffix}", columns)) == columns
    assert os.listdir(tmp_path) == [f"file.{suffix}"]


def test_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    """None where a row of a .jsonl lacks one; far behind, too."""
    path = tmp_path / "new.jsonl"
    rows: list[dict[str, Any]] = [{"text": "a"}] * 1500
    rows += [{"id": 3}, {"text": "b", "tag": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = {name: [row.get(name) for row in rows] for name in ("text", "id", "tag")}
    assert read_columns(path) == expected
    again = write(tmp_path / "again.jsonl", read_columns(path))
    assert read_columns(again) == expected


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("names", [(), ("text",)])
def test_two_columns_of_one_name(
    suffix: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """In training, and in a prediction, which reads all."""
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
        pyarrow.parquet.write_table(table, path)
    else:
        path.write_text("text,text\na,b\n".replace(",", "\t"))
    with pytest.raises(UsageError, match="has 2 columns of the name 'text'"):
        read_columns(path, names)


@pytest.mark.parametrize("names", [(), ("text",)])
@pytest.mark.parametrize("cell", ["a \ud800 b", ["\udfff"], {"a": "\ud83d"}])
def test_half_of_a_character(names: tuple[str, ...], cell: Any, tmp_path: Path) -> None:
    """Refused with its line, in training and in a prediction; in a column that training does not
    read it harms nothing, and a whole character in two escapes is one."""
    path = tmp_path / "new.jsonl"
    whole = json.dumps({"text": "\U0001f600", "other": "a"})
    path.write_text(whole + "\n" + json.dumps({"text": cell, "other": "b"}) + "\n")
    assert read_columns(path, ["other"]) == {"other": ["a", "b"]}
    with pytest.raises(
        UsageError, match=r"line 2 has half of .* 'text': .ud[0-9a-f]{3}\n"
    ):
        read_columns(path, names)
    path.write_text(whole + "\n")
    assert read_columns(path, names)["text"] == ["\U0001f600"]
    path.write_text(json.dumps({"a\ud800": "b"}))
    with pytest.raises(UsageError, match="line 1 has half of a character"):
        read_columns(path)


def test_a_header_alone(tiny_model: Path, tmp_path: Path) -> None:
    run = write_trained(tmp_path / "runs/emotion", tiny_model, task="emotion")
    for name in ("new.csv", "new.jsonl", "new.parquet"):
        file = tmp_path / name
        file.write_text("text\n" if name == "new.csv" else "\n")
        if name == "new.parquet":
            pyarrow.parquet.write_table(
                pyarrow.table({"text": pyarrow.array([], "str")}), file
            )
        with pytest.raises(UsageError, match="has no rows"):
            configure(run, file, None, False, {})


def test_rows_that_are_no_file(tiny_model: Path, tmp_path: Path) -> None:
    run = write_trained(tmp_path / "runs/emotion", tiny_model, task="emotion")
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    (tmp_path / "zeros.csv").write_bytes(bytes(10_000))
    for name, words in (
        ("fifo", "is a FIFO, and no file"),
        ("device", "is a device, and no file"),
        ("zeros", "holds nothing but zeros"),
    ):
        with pytest.raises(UsageError, match=words):
            configure(run, tmp_path / f"{name}.csv", None, False, {})


def test_an_adapters_file_beside_a_whole_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = write_trained(tmp_path / "runs/emotion", tiny_model, task="emotion")
    file = tmp_path / "new.csv"
    file.write_text("text\na\n")
    configure(run, file, None, False, {})
    stray = run.model / "adapter_config.json"
    stray.write_text('{"base_model_name_or_path": "other"}')
    with pytest.raises(
        UsageError, match="a whole model and, beside it, an adapter"
    ) as e:
        configure(run, file, None, False, {})
    assert str(e.value.hint).endswith(f"rm {stray}")


DAY = datetime.datetime(2026, 2, 3, 4, 5, tzinfo=datetime.UTC)
COLUMNS: dict[str, list[Any]] = {
    "binary": [None, b"a"],
    "span": [None, datetime.timedelta(1)],
    "days": [None, [DAY.date()]],
    "mixed": ["a", 1],
    "large": [2**70, 1],
    "objects": [{}, {}],
}
"""What not every kind of file has a form for."""


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("name", COLUMNS)
def test_what_an_output_cannot_hold_is_known_at_submission(
    name: str, suffix: str, tmp_path: Path
) -> None:
    """The check fails where writing would; of a .csv also for what it holds in Python's form."""
    output = tmp_path / f"out.{suffix}"
    columns = {"text": ["a", "b"], name: COLUMNS[name]}
    has_form = name in ("mixed", "large", "objects")
    if suffix == "parquet":
        has_form = not has_form
    if has_form:
        check_writable(columns, output, "new")
        write_rows(output, columns)
        assert read_columns(output)["text"] == ["a", "b"]
        return
    with pytest.raises(UsageError, match=f"the column '{name}'"):
        check_writable(columns, output, "new")
    if suffix != "csv" or name == "days":
        with pytest.raises((TypeError, pyarrow.ArrowException, OverflowError)):
            write_rows(output, columns)


def test_index_of_pandas(tmp_path: Path) -> None:
    """pandas writes one without a name as a column, and takes it for the index by the metadata."""
    rows = pandas.DataFrame({"text": ["a", "b", "c"], "label": [1, 2, 3]})
    dates = pandas.to_datetime(["2020-01-01", "2021-01-01"])
    pairs = pandas.MultiIndex.from_tuples([("a", 1), ("b", 2)])
    numbers = (pandas.RangeIndex(2, 6, 2), pandas.RangeIndex(7, 9))
    for index in ([7, 3], ["x", "y"], dates, pairs, *numbers):
        part = rows.iloc[[0, 2]].set_axis(index)
        part.to_parquet(tmp_path / "new.parquet")
        columns = read_columns(tmp_path / "new.parquet")
        output = tmp_path / "out.parquet"
        source = tmp_path / "new.parquet"
        write_rows(output, columns | {"prediction": ["p", "q"]}, source)
        found = pandas.read_parquet(output)
        assert found.index.equals(part.index)
        assert list(found.columns) == ["text", "label", "prediction"]
        write_rows(tmp_path / "out.jsonl", columns)
        assert read_columns(tmp_path / "out.jsonl")["text"] == ["a", "c"]


@pytest.mark.parametrize("start", [2**63, -(2**63) - 1, 2**70, 3])
def test_index_of_pandas_that_no_column_can_hold(start: int, tmp_path: Path) -> None:
    """Anybody may write the description; the rows are read without it. Nor does it count others."""
    file = tmp_path / "new.parquet"
    pandas.DataFrame({"text": ["a", "b"]}, pandas.RangeIndex(1, 3)).to_parquet(file)
    table = pyarrow.parquet.read_table(file)
    for stop in (start + 2, start + 2**80):
        index = {"start": start, "stop": stop, "step": 1, "name": None}
        facts = json.dumps({"index_columns": [index]})
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({"pandas": facts}), file
        )
        columns = read_columns(file)
        assert columns.pop("text") == ["a", "b"]
        if (start, stop) == (3, 5):
            assert columns == {"__index_level_0__": [3, 4]}
        else:
            assert not columns


def test_file_stays_where_a_full_disk_is_noticed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network filesystems accept writes that do not fit, and say so when they are to be kept."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = write(tmp_path / "rows.jsonl", {"text": ["before"]})
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_rows(file, {"text": ["after"]})
    assert read_columns(file) == {"text": ["before"]}
    assert list(tmp_path.iterdir()) == [file]


def test_dates_and_decimals_are_texts_in_json(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "a": [DAY],
        "b": [DAY.date()],
        "c": [DAY.time()],
        "d": [Decimal("1.20")],
    }
    for suffix in ("jsonl", "csv"):
        output = tmp_path / f"out.{suffix}"
        check_writable(columns, output, "new")
        texts_of_cells = list(
            itertools.chain(*read_columns(write(output, columns)).values())
        )
        assert texts_of_cells == [
            "2026-02-03T04:05:00+00:00", "2026-02-03", "04:05:00", "1.20",
        ]  # fmt: skip


def test_a_question_without_room_is_named_at_submission(
    tiny_model: Path, tmp_path: Path
) -> None:
    """By its row and its id; the job would refuse it as the submission does."""
    run = write_trained(
        tmp_path / "runs/squad", tiny_model, task="squad", max_length=32, doc_stride=8
    )
    columns = {"question": ["joy", "love " * 21], "context": ["fear"] * 2}
    for names, where in (
        (["q1", "q2"], "row 2, the question 'q2', has"),
        ([], "row 2 has"),
    ):
        ids = {"id": names} if names else {}
        file = tmp_path / "new.jsonl"
        write(file, ids | columns)
        with pytest.raises(UsageError, match=f"{where} 21 tokens: beside them, 32"):
            configure(run, file, None, False, {})
        write(file, ids | columns | {"question": ["joy", "love " * 20]})
        config = configure(run, file, None, False, {})
        task = tasks.get(ResolvedConfig.of(config.program))
        job: Any = SimpleNamespace(config=config)
        fill_tokens(tmp_path / f"tokens{len(names)}", task, job)


@pytest.mark.processes
def test_files_that_cannot_be_right(trained: Done, tmp_path: Path) -> None:
    run = trained.run
    assert_two_lines(predict(run, tmp_path / "none.csv"), "no such file")
    other = write(tmp_path / "other.csv", {"body": ["a"]})
    assert_two_lines(predict(run, other), "has no column 'text'")
    done = write(tmp_path / "done.csv", {"text": ["a"], "prediction": ["b"]})
    assert_two_lines(predict(run, done), "has a column 'prediction' already")
    (tmp_path / "new.txt").write_text("a\n")
    assert_two_lines(
        predict(run, tmp_path / "new.txt"), "is none of .csv, .tsv, .jsonl, .parquet"
    )
    file = write(tmp_path / "new.csv", {"text": ["a"]})
    array = str(tmp_path / "out.npy")
    assert_two_lines(predict(run, file, "--output", array), "is none of .csv, .tsv")
    output = str(tmp_path / "none" / "out.csv")
    assert_two_lines(predict(run, file, "--output", output), "no such folder")
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path, symlinks=True)
    config = json.loads(copy.config.read_text())
    settings = config["program"]["settings"] | {"task": "synthetic", "recipe": None}
    program = config["program"] | {"settings": settings}
    copy.config.write_text(json.dumps(config | {"program": program}))
    assert_two_lines(predict(copy, file), "knows no rows of --task synthetic")
    copy.config.write_text(json.dumps(config))
    for weights in copy.model.glob("*.safetensors"):
        weights.unlink()
    assert_two_lines(
        predict(copy, file), "has no finished model: there is none in its model/"
    )


@pytest.mark.extra("training")
def test_other_tasks(tmp_path: Path, tiny_model: Path) -> None:
    """Several labels, numbers, entities, texts."""
    words = write_words(tmp_path / "words", 40, 20)
    many = write_many_labels(tmp_path / "many", 40, 20)
    copies = tmp_path / "copies"
    numbers = tmp_path / "numbers"
    from tests.support.models import write_copies

    write_copies(copies, 40, 20)
    rows = [{"text": f"word{i} word{i + 1}", "label": i / 10} for i in range(20)]
    write_splits(numbers, {"train": rows, "validation": rows})
    bart = write_seq2seq_model(tmp_path / "t5")
    asked: list[tuple[str, Path, Path]] = [
        ("token-classification", words, tiny_model),
        ("multi-label", many, tiny_model),
        ("text-regression", numbers, tiny_model),
        ("seq2seq", copies, bart),
    ]
    for task, data, model in asked:
        run = train(
            *(
                tmp_path / "runs",
                "--task",
                task,
                "--data",
                str(data),
                "--model",
                str(model),
            ),
            *("--epochs", "1", "--batch-size", "4", "--max-length", "32"),
        ).run
        file = data / "validation.jsonl"
        output = tmp_path / f"{task}.jsonl"
        done = predict(run, file, "--output", str(output))
        assert done.code == 0, (task, done.err)
        found = [json.loads(line) for line in output.read_text().splitlines()]
        given = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(found) == len(given)
        for row, before in zip(found, given, strict=True):
            assert {**row, **before} == row
            predicted = row["prediction"]
            if task == "token-classification":
                for each in predicted:
                    own = row["tokens"][each["first"] : each["last"] + 1]
                    assert each["text"] == " ".join(own)
            elif task == "multi-label":
                assert len(predicted) == len(row["probability"])
            else:
                assert isinstance(
                    predicted, float if task == "text-regression" else str
                )


@pytest.mark.parametrize("task", ["text-classification", "multi-label"])
@pytest.mark.parametrize(
    "labels", [[3, -1], [True, False], ["1", "0"], ["01", "1"]], ids=str
)
def test_labels_are_of_the_type_of_the_training_data(
    task: str, labels: list[Any], tmp_path: Path, tiny_model: Path
) -> None:
    """Also on a base that was trained for labels of another type; a .csv has the same text."""
    column, values = "label", labels * 2
    if task == "multi-label":
        column, values = "labels", [[label] for label in labels] * 2
    rows = [
        {"text": f"word{i} word{i % 2}", column: label}
        for i, label in enumerate(values)
    ]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    base = shutil.copytree(tiny_model, tmp_path / "base")
    base_config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(base_config | {"label_type": "bool"}))
    fields = {"task": task, "data": str(data)}
    trainee: Any = tasks.get(TrainConfig.resolve(**fields, model=str(base)))
    tokens = trainee.prepare()
    tokens.save(tmp_path / "kept")
    model = trainee.model(TokenData.load(tmp_path / "kept"))
    run = write_trained(tmp_path / "runs/labels", tiny_model, task=task)
    model.save_pretrained(run.model)
    config = configure(run, data / "train.jsonl", tmp_path / "out.jsonl", False, {})
    predictions = predicted(config, tmp_path / "tokens")["prediction"]
    if task == "multi-label":
        predictions = list(itertools.chain(*predictions))
    assert {type(each) for each in predictions} <= {type(labels[0])}
    assert set(predictions) <= set(labels)
    assert predictions or task == "multi-label"


def test_a_prediction_keeps_no_option_of_adapters(
    tmp_path: Path, tiny_model: Path
) -> None:
    """They were merged into the model: the options that need --lora go with it."""
    file = write(tmp_path / "new.csv", {"text": ["hello"]})
    run = write_run(
        tmp_path / "run",
        task="text-classification",
        model=str(tiny_model),
        text_column="text",
        lora=16,
        lora_alpha=32,
        use_dora=True,
        merge=True,
        optimizer="auto",
        reference_batch_size=64,
    )
    run.model.mkdir()
    (run.model / "model.safetensors").touch()
    config = configure(run, file, tmp_path / "out.csv", False, {"precision": "fp32"})
    settings = config.program.settings
    for name, each in options(TrainConfig).items():
        if each.predicts == "reset":
            # As JSON holds it.
            assert settings[name] == json.loads(json.dumps(each.default))
    assert settings["precision"] == "fp32"
    assert settings["text_column"] == "text"


# --- rows that cannot be predicted ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "columns", "message"),
    [
        ("text-classification", {"text": ["a", " ", ""]}, "2 of 3 rows have no text"),
        ("text-classification", {"text": ["a", 3]}, "row 2 has 3 in the column"),
        ("text-classification", {"body": ["a"]}, "has no column 'text'"),
        ("token-classification", {"tokens": [["a"], []]}, "1 of 2 rows have no text"),
        ("token-classification", {"tokens": ["a b"]}, "no list of words"),
        ("squad", {"question": ["a"], "text": ["b"]}, "has no column 'context'"),
        ("squad", {"question": ["a", ""], "context": ["b", "c"]}, "1 of 2 rows"),
        (
            "squad",
            {"id": ["1", "2", "1"], "question": ["a"] * 3, "context": ["b"] * 3},
            "rows 1 and 3 have the id '1'",
        ),
        ("causal-lm", {"text": ["a", "\n"]}, "1 of 2 rows have no text: row 2"),
        ("sft", {"messages": [[]]}, "1 of 1 rows have no text"),
        ("sft", {"messages": ["hello"]}, "row 1 has the messages"),
        ("sft", {"messages": [[{"role": "cat", "content": "a"}]]}, "the role 'cat'"),
    ],
)
def test_rows_that_cannot_be_predicted(
    task: str, columns: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", columns)
    with pytest.raises(UsageError) as error:
        inputs_of(TrainConfig.resolve(task=task, data="d", model="m"), file)
    assert message in str(error.value)


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that has saved an adapter, whose weights are not zero; its base has another head."""
    folder = tmp_path_factory.mktemp("adapted")
    base = write_model(folder / "base", spread=0.3)
    names = dict(enumerate(LABELS))
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=len(LABELS), id2label=names
    )
    settings: dict[str, Any] = {"target_modules": "all-linear", "task_type": "SEQ_CLS"}
    model = get_peft_model(model, LoraConfig(r=4, **settings))
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name or "classifier" in name:
            torch.nn.init.normal_(weight, std=0.5)
    run = write_run(
        folder / "runs/emotion",
        task="emotion",
        model=str(base),
        lora=4,
        batching="packed",
    )
    model.save_pretrained(run.model)
    model.config.save_pretrained(run.model / "config")
    AutoTokenizer.from_pretrained(base).save_pretrained(run.model)
    return run


@pytest.mark.processes
def test_an_adapter_predicts_as_by_peft(
    adapted: RunDir, tmp_path: Path, tiny_data: Path
) -> None:
    """In packed batches."""
    own = texts(tiny_data, 30)
    file = write(tmp_path / "new.jsonl", {"text": own})
    output = tmp_path / "out.jsonl"
    done = predict(adapted, file, "--output", str(output), "--precision", "fp32")
    assert done.code == 0, done.err
    model = AutoPeftModelForSequenceClassification.from_pretrained(
        adapted.model, num_labels=len(LABELS)
    )
    tokenizer = AutoTokenizer.from_pretrained(adapted.model)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row, text in zip(rows, own, strict=True):
        logits = model.eval()(**tokenizer(text, return_tensors="pt")).logits
        best = logits.softmax(-1).max(-1)
        assert row["prediction"] == LABELS[int(best.indices)]
        assert row["probability"] == pytest.approx(float(best.values), abs=1e-5)
    assert len({row["prediction"] for row in rows}) > 2
    again = configure(done.run, file, tmp_path / "again.jsonl", False, {})
    assert again.program.settings["adapter"] == str(adapted.model)


def test_an_adapter_whose_base_is_another(adapted: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(adapted.path, copy.path)
    base = tmp_path / "base"
    config = json.loads(copy.config.read_text())
    before = config["program"]["settings"]["model"]
    shutil.copytree(before, base)
    copy.config.write_text(json.dumps(config).replace(before, str(base)))
    file = write(tmp_path / "new.csv", {"text": ["hello"]})

    def submit() -> RunConfig:
        return configure(copy, file, tmp_path / "out.csv", False, {})

    program = submit().program
    config["program"]["inputs"] = program.inputs
    config["program"]["settings"]["model"] = str(base)
    copy.config.write_text(json.dumps(config))
    assert str(base) in submit().program.paths
    (base / "README.md").write_text("another")
    with pytest.raises(UsageError, match="has changed since the run was submitted"):
        submit()
    shutil.rmtree(base)
    with pytest.raises(UsageError, match="is not there any more") as error:
        submit()
    assert error.value.hint
    assert not (tmp_path / "out.csv").exists()


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.extra("training")
@pytest.mark.processes
@pytest.mark.parametrize("preset", ["v1", "v2"])
def test_answers_have_the_scores_of_the_run(preset: str, tmp_path: Path) -> None:
    """Of the rows that the run has evaluated, on two ranks: texts of several windows."""
    from torchmetrics.text import SQuAD

    model = write_model(tmp_path / "model", spread=0.3)
    data = write_squad(tmp_path / "data", 80, 40, none=preset == "v2")
    sizes = ("--max-length", "24", "--doc-stride", "8", "--precision", "fp32")
    run = train(
        tmp_path / "runs",
        *("--task", "squad", "--preset", preset, "--data", str(data), "--model"),
        *(str(model), *sizes, "--epochs", "6", "--batch-size", "8"),
        *("--learning-rate", "0.01"),
    ).run
    output = tmp_path / "out.jsonl"
    file = data / "validation.jsonl"
    done = predict(run, file, "--output", str(output), "--nodes", "2")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    by_id = json.loads((tmp_path / "out.jsonl.json").read_text())
    assert by_id == {row["id"]: row["prediction"] for row in rows}
    metrics = json.loads(run.result.read_text())["metrics"]
    assert metrics["squad_f1"] > 5
    if preset == "v2":  # torchmetrics has v1 alone
        scores = squad(
            [*by_id.values()], [row["answers"]["text"] for row in rows], True
        )
        assert metrics | scores == metrics  # which have the loss, too
        assert "" in by_id.values()
        return
    predictions = []
    references = []
    for row in rows:
        predictions.append({"prediction_text": row["prediction"], "id": row["id"]})
        references.append({"answers": row["answers"], "id": row["id"]})
    expected = SQuAD()(predictions, references)
    assert metrics["squad_f1"] == pytest.approx(float(expected["f1"]), abs=1e-4)
    exact = float(expected["exact_match"])
    assert metrics["squad_exact_match"] == pytest.approx(exact, abs=1e-4)
    # Rows of another kind of file have answers of their own.
    output.unlink()
    again = predict(run, file, "--output", str(output))
    assert_two_lines(again, "out.jsonl.json' exists, and is not overwritten")
    other = predict(run, file, "--output", str(tmp_path / "out.csv"))
    assert other.code == 0, other.err
    assert json.loads((tmp_path / "out.csv.json").read_text()) == by_id


def test_answers_are_those_of_single_windows(tmp_path: Path) -> None:
    """Without identifiers; what begins a question, and columns that training needs, may lack."""
    model = write_model(tmp_path / "model", spread=0.3)
    head = AutoModelForQuestionAnswering.from_pretrained(model)
    head.save_pretrained(tmp_path / "head")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "head")
    run = write_trained(
        tmp_path / "runs/squad",
        tmp_path / "head",
        task="squad",
        max_length=64,
        doc_stride=8,
    )
    questions = ["joy word0", "  love", "fear"]
    contexts = ["word1 word2 joy word3", "love word5", "anger word7 fear word8 word9"]
    columns = {"question": questions, "context": contexts}
    file = write(tmp_path / "new.csv", columns)
    config = configure(run, file, tmp_path / "out.csv", False, {})
    answers = predicted(config, tmp_path / "tokens")["prediction"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for question, context, answer in zip(questions, contexts, answers, strict=True):
        inputs = tokenizer(
            question, context, return_tensors="pt", return_offsets_mapping=True
        )
        offsets = inputs.pop("offset_mapping")[0].tolist()
        output = head.eval()(**inputs)
        best = {}
        for first, last in itertools.combinations_with_replacement(
            range(len(offsets)), 2
        ):
            if inputs["token_type_ids"][0, first] and last < len(offsets) - 1:
                score = output.start_logits[0, first] + output.end_logits[0, last]
                best[float(score)] = context[offsets[first][0] : offsets[last][1]]
        assert answer == best[max(best)]
