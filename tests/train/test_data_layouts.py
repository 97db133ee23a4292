"""Data as the datasets library and the hub lay it out: folders of save_to_disk, and shards."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from slurmft.core import fingerprint
from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.commands import data as data_command
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.rows import read_columns
from slurmft.train.login.sources import find_split, localize
from slurmft.train.tasks.pretrained import Pretrained
from tests.support.models import write_splits

Rows = list[dict[str, Any]]


def rows_of(count: int) -> Rows:
    return [
        {"text": f"joy word{row} love", "label": ["delivery", "billing"][row % 2]}
        for row in range(count)
    ]


SPLITS = {"train": rows_of(23), "validation": rows_of(7), "test": rows_of(5)}


def saved_dict(folder: Path) -> None:
    contents = {name: datasets.Dataset.from_list(rows) for name, rows in SPLITS.items()}
    datasets.DatasetDict(contents).save_to_disk(
        str(folder), num_shards={"train": 3, "validation": 1, "test": 2}
    )


def shards(suffix: str, place: str = ".") -> Callable[[Path], None]:
    """Writes each split as three files."""

    def write(folder: Path) -> None:
        (folder / place).mkdir(parents=True)
        for name, rows in SPLITS.items():
            dataset = datasets.Dataset.from_list(rows)
            for index in range(3):
                shard = dataset.shard(3, index, contiguous=True)
                path = folder / place / f"{name}-{index:05}-of-00003{suffix}"
                write_shard(path, shard)

    return write


def write_shard(path: Path, shard: Any) -> None:
    match path.suffix:
        case ".parquet":
            shard.to_parquet(str(path))
        case ".csv":
            shard.to_csv(str(path))
        case ".gz":
            with gzip.open(path, "wb") as file:
                shard.to_json(file)
        case ".arrow":
            with pyarrow.ipc.new_file(str(path), shard.data.table.schema) as writer:
                writer.write_table(shard.data.table)
        case _:
            shard.to_json(str(path))


LAYOUTS = {
    "save_to_disk": saved_dict,
    "as on the hub": shards(".parquet", "data"),
    "parquet": shards(".parquet"),
    "csv": shards(".csv"),
    "jsonl": shards(".jsonl", "data"),
    "jsonl.gz": shards(".jsonl.gz"),
    "arrow": shards(".arrow"),
}


def config_of(data: Path, **given: Any) -> TrainConfig:
    values = {"task": "text-classification"} | given
    return localize(TrainConfig.resolve(data=str(data), **values))


def task_of(data: Path, model: Path, **given: Any) -> Pretrained:
    task = tasks.get(config_of(data, model=str(model), **given))
    assert isinstance(task, Pretrained)
    return task


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_rows_of_single_files(
    layout: str, tmp_path: Path, tiny_model: Path
) -> None:
    single = write_splits(tmp_path / "single", SPLITS)
    data = tmp_path / "data"
    LAYOUTS[layout](data)
    expected = inputs.check(config_of(single))
    found = inputs.check(config_of(data))
    contents = [facts["what"] for facts in expected.values()]
    assert [facts["what"] for facts in found.values()] == contents
    tokens = task_of(single, tiny_model).prepare()
    task = task_of(data, tiny_model)
    again = task.prepare()
    assert again.train.tokens.tolist() == tokens.train.tokens.tolist()
    assert again.train.labels.tolist() == tokens.train.labels.tolist()
    assert again.validation.tokens.tolist() == tokens.validation.tokens.tolist()
    # All files decide which tokens are kept.
    sources = task.sources()
    assert sources is not None
    assert len(sources["data"][0]) == 3


def test_rows_are_those_of_the_library(tmp_path: Path) -> None:
    saved_dict(tmp_path / "saved")
    for split, rows in datasets.load_from_disk(str(tmp_path / "saved")).items():
        path = find_split(tmp_path / "saved", split)
        assert read_columns(path, ["text", "label"]) == rows[:]
    shards(".parquet", "data")(tmp_path / "hub")
    loaded = datasets.load_dataset(
        str(tmp_path / "hub"), cache_dir=str(tmp_path / "cache")
    )
    for split, rows in loaded.items():
        path = find_split(tmp_path / "hub", split)
        assert read_columns(path, ["text", "label"]) == rows[:]


def test_a_dataset_alone_is_training_data(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "data"
    datasets.Dataset.from_list(SPLITS["train"]).save_to_disk(str(data), num_shards=2)
    with pytest.raises(UsageError, match="has no validation file") as error:
        config_of(data)
    assert "--validation-fraction" in str(error.value.hint)
    given = {"validation_fraction": 0.2}
    (path,) = inputs.check(config_of(data, **given))
    assert path == f"{data}/data-*-of-00002.arrow"
    found = task_of(data, tiny_model, **given).prepare()
    assert (len(found.train), len(found.validation)) == (18, 5)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_classes_have_the_names_that_the_data_has(
    suffix: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["z", "a"]),
        }
    )
    rows = {"text": ["joy", "love", "fear", "anger"], "label": [0, 1, 1, 0]}
    dataset = datasets.Dataset.from_dict(rows, features)
    data = tmp_path / "data"
    if suffix == ".parquet":
        data.mkdir()
        for split in ("train", "validation"):
            dataset.to_parquet(str(data / f"{split}.parquet"))
    else:
        contents = {"train": dataset, "validation": dataset}
        datasets.DatasetDict(contents).save_to_disk(str(data))
    found = task_of(data, tiny_model).prepare()
    assert found.labels == ["z", "a"]
    assert found.validation.labels.tolist() == rows["label"]
    assert inputs.classes(config_of(data)) == ["z", "a"]
    data_command.main([str(data)])
    assert "0 z    2 (50.0 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 7, "label": "billing"}, "00002.jsonl': row 3 has 7 in the column"),
        (
            {"text": "joy", "label": ""},
            r"1 of 12 rows have no label: row 3 of train-00001-of-00002.jsonl",
        ),
        (
            {"text": "joy", "label": 7},
            "row 3 of train-00001-of-00002.jsonl has the label 7",
        ),
    ],
)
def test_messages_name_the_file_and_its_row(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_splits(
        tmp_path / "data",
        {
            "train-00000-of-00002": rows_of(8),
            "train-00001-of-00002": [*rows_of(2), row, *rows_of(1)],
            "validation": rows_of(4),
        },
    )
    for given in ({}, {"validation_fraction": 0.2}):
        if given:
            if row["label"] == 7:  # it would be a class of one row
                continue
            (tmp_path / "data" / "validation.jsonl").unlink()
        with pytest.raises(UsageError, match=message):
            inputs.check(config_of(tmp_path / "data", **given))


@pytest.mark.processes
def test_shards_with_a_hash_say_how_they_lose_it(tmp_path: Path) -> None:
    """As older versions of datasets have uploaded them."""
    folder = tmp_path / "my data" / "data"
    folder.mkdir(parents=True)
    for name in ("a09b74b3ef9c3b56", "0123456789abcdef"):
        number = int(name == "0123456789abcdef")
        file = folder / f"train-0000{number}-of-00002-{name}.parquet"
        file.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="has no train file") as error:
        find_split(folder.parent, "train")
    _, command = str(error.value.hint).split("the hash out of the names: ")
    subprocess.run(["bash", "-c", command], check=True)
    found = find_split(folder.parent, "train")
    assert found == folder / "train-*-of-00002.parquet"


def test_shards_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shards(".parquet", "data")(data)
    shutil.copy(data / "data" / "train-00000-of-00003.parquet", data / "train.parquet")
    with pytest.raises(UsageError, match="more than one train file"):
        config_of(data)
    (data / "train.parquet").unlink()
    (data / "data" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(UsageError, match="1 of 3 files are missing: train-00001-of"):
        config_of(data)
    saved_dict(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "data-00002-of-00003.arrow").unlink()
    with pytest.raises(UsageError, match="files are missing: data-00002-of"):
        config_of(tmp_path / "saved")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "names no files of data"),
        (
            {
                "_data_files": [{"filename": "dataset.arrow"}],
                "_indices_data_files": [1],
            },
            "was saved as a choice of rows",
        ),
    ],
)
def test_folders_that_are_not_as_saved_today(
    state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved_dict(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match=message) as error:
        config_of(tmp_path / "saved")
    assert "save_to_disk" in str(error.value.hint)


def test_damaged_arrow_files(tmp_path: Path) -> None:
    saved_dict(tmp_path / "saved")
    file = tmp_path / "saved" / "train" / "data-00001-of-00003.arrow"
    content = file.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], b"ARROW1"):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="data-00001-of-00003"):
            inputs.check(config_of(tmp_path / "saved"))


def test_fingerprint_is_of_all_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shards(".jsonl")(data)
    path = data / "train-*-of-00003.jsonl"
    before = fingerprint.of(path)
    assert before["bytes"] == sum(file.stat().st_size for file in data.glob("train-*"))
    assert inputs.check(config_of(data))[str(path)]["sha256"] == before["sha256"]
    last = data / "train-00002-of-00003.jsonl"
    last.write_text(last.read_text().replace("joy", "joi"))
    assert fingerprint.of(path)["sha256"] != before["sha256"]
    last.rename(data / "train-00003-of-00003.jsonl")
    for file in data.glob("train-*"):
        file.unlink()
    with pytest.raises(FileNotFoundError):
        fingerprint.of(path)
