"""`slurmft data`: what it says of data, and what it says where that cannot be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.errors import UsageError
from slurmft.train.commands import data
from tests.conftest import assert_two_lines, slurmft
from tests.support.models import write_model, write_splits

pytestmark = pytest.mark.processes


def write(folder: Path, classes: int = 3) -> Path:
    rows = [
        {"body": f"text {i} of {i % 7}", "team": f"team {i % classes}"}
        for i in range(40 * classes)
    ]
    return write_splits(
        folder, {"train": rows, "validation": [*rows[: 2 * classes], rows[0]]}
    )


def test_screen(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    flags = ("--text-column", "body", "--label-column", "team")
    done = slurmft("data", str(folder), *flags)
    assert done.code == 0
    assert max(map(len, done.out.partition("\nwarning")[0].splitlines()[1:])) < 60
    assert "also in train         7\n" in done.out
    assert "team 0  40 (33.3 %)  3 (42.9 %)\n" in done.out
    assert "words, train            4       4           4\n" in done.out
    assert "no tokenizer here" in done.out
    assert "warning: " in done.out
    model = write_model(tmp_path / "model")
    done = slurmft(
        "data", str(folder), *flags, "--model", str(model), "--max-length", "5"
    )
    assert "tokens, train       6       6           6\n" in done.out
    assert "train: 120 texts cut to 5 tokens\n" in done.out


def test_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    flags = ("--text-column", "body", "--label-column", "team", "--json")
    found = json.loads(slurmft("data", str(folder), *flags).out)
    assert found["splits"]["validation"]["repeated"] == 1
    assert found["splits"]["train"]["classes"] == {
        "team 0": 40,
        "team 1": 40,
        "team 2": 40,
    }
    assert found["splits"]["train"]["words"] == {"median": 4, "p95": 4, "longest": 4}


def test_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read as training data: it need not be divided yet."""
    file = write(tmp_path / "data") / "train.jsonl"
    file = file.rename(tmp_path / "all of it.jsonl")
    flags = ["--text-column", "body", "--label-column", "team", "--json"]
    assert data.main([str(file), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["warnings"] == []
    assert list(found["splits"]) == ["train"]
    split = found["splits"]["train"]
    assert (split["where"], split["texts"]) == (str(file), 120)
    assert split["classes"] == {"team 0": 40, "team 1": 40, "team 2": 40}


def test_many_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "data", 30)
    data.main([str(folder), "--text-column", "body", "--label-column", "team"])
    out = capsys.readouterr().out
    assert "... 15 more; then the smallest:\n" in out
    assert out.count("\nteam ") == 15


def test_data_that_is_no_file(tmp_path: Path) -> None:
    """What it is is said, and it is not waited for."""
    kinds: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "fifo": ("is a FIFO", os.mkfifo),
        "device": ("is a device", lambda path: path.symlink_to("/dev/zero")),
        "dangling": ("is a link that leads nowhere", lambda path: path.symlink_to("x")),
        "zeros": ("nothing but zeros", lambda path: path.write_bytes(bytes(10_000))),
    }
    for name, (words, put) in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "validation.csv").write_text("text,label\na,b\n")
        put(folder / "train.csv")
        with pytest.raises(UsageError, match=words) as error:
            data.main([str(folder), "--task", "text-classification"])
        assert str(folder / "train.csv") in error.value.message
        if name not in ("zeros", "dangling"):
            with pytest.raises(UsageError, match=f"{words}, and no folder"):
                data.main([str(folder / "train.csv")])
        shards = tmp_path / f"{name}-shards"
        shards.mkdir()
        put(shards / "train-00000-of-00001.csv")
        with pytest.raises(UsageError):
            data.main([str(shards), "--task", "text-classification"])


@pytest.mark.parametrize(
    "flags", [("--mix", "a/b:0.2"), ("--validation-fraction", "0.1")]
)
def test_options_of_data_sets_are_not_for_one_file(
    flags: tuple[str, str], tmp_path: Path
) -> None:
    file = write(tmp_path / "data") / "train.jsonl"
    with pytest.raises(UsageError, match=f"{flags[0]} is for a data set, and "):
        data.main([str(file), *flags])


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    assert_two_lines(slurmft("data", str(folder)), "has no column 'text'")
    assert_two_lines(slurmft("data", str(tmp_path / "none")), "no such folder")
    assert_two_lines(slurmft("data"), "no data of its own to look at")
    assert_two_lines(slurmft("data", "--task", "synthetic"), "makes its data itself")
    as_in_submit = slurmft("data", "--data", "x")
    assert_two_lines(as_in_submit, "unknown flag '--data'")
    assert "it is no flag here: slurmft data DIR|FILE|ID" in as_in_submit.err
    (folder / "validation.jsonl").unlink()
    assert_two_lines(slurmft("data", str(folder)), "has no validation file")


def test_data_of_the_hubs_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import ClassLabel, Dataset, Features, Value
    from huggingface_hub import constants

    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=["low", "high"])}
    )
    rows = {"text": ["a b", "a", "c", "d"], "label": [0, 1, 1, 1]}

    def load_dataset(name: str, subset: Any, split: str) -> Any:
        if name != "me/texts":
            raise OSError(f"no {name}")
        return Dataset.from_dict(rows, features)

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data.main(["me/texts"])
    out = capsys.readouterr().out
    assert "1 high  3 (75.0 %)  3 (75.0 %)\n" in out
    assert "also in train         4\n" in out
    with pytest.raises(Exception, match="is no folder, and not in the cache") as error:
        data.main(["me/others"])
    assert "slurmft fetch" in str(error.value)
    assert "not in the cache: no me/others\n" in str(error.value)
    # huggingface_hub reads the variable once, and retries for half a minute.
    assert constants.HF_HUB_OFFLINE
    # What is wrong with a data set that is there is not hidden behind that.
    with pytest.raises(UsageError) as wrong:
        data.main(["me/texts", "--text-column", "body"])
    assert wrong.value.message == "'me/texts (train)' has no column 'body'"
