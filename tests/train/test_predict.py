"""`slurmft predict`: rows of a file, predicted by the model of a finished run."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.options import options
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login.predict import configure
from slurmft.train.login.rows import read_columns, write_rows
from tests.conftest import Done, Following, assert_two_lines, slurmft
from tests.support import until
from tests.support.made_runs import write_run
from tests.support.models import write_many_labels, write_seq2seq_model, write_words
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
    output = str(tmp_path / "none" / "out.csv")
    assert_two_lines(predict(run, file, "--output", output), "no such folder")
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path, symlinks=True)
    config = json.loads(copy.config.read_text())
    for change, fact in (
        ({"task": "synthetic", "recipe": None}, "knows no rows of --task synthetic"),
        ({"lora": 4}, "saved an adapter"),
    ):
        settings = config["program"]["settings"] | change
        program = config["program"] | {"settings": settings}
        copy.config.write_text(json.dumps(config | {"program": program}))
        assert_two_lines(predict(copy, file), fact)
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
    from tests.support.models import write_copies, write_splits

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
