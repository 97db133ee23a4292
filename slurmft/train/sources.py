"""Checks of --model and --data where they are local folders, before the job waits in a queue."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import shlex
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute
from slurmft.core.hub import is_local
from slurmft.train.config import TrainConfig
from slurmft.train.recipes import TASKS

SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")


def localize(train: TrainConfig) -> TrainConfig:
    """The configuration with local folders checked and made absolute: nodes start elsewhere.

    What can be seen in a glance is checked here, before the job waits in a queue: that files exist,
    have a first row, and have the columns.

    Raises:
        UsageError: a folder that does not exist, or lacks the files of a model or a data set; a
            file that is empty, unreadable, or has no such column.
    """
    changes: dict[str, Any] = {}
    task = TASKS[train.task]
    check_given(train)
    if train.data is not None and is_local(train.data):
        folder = _folder("--data", train.data)
        chosen = (train.text_column, train.text_pair_column, train.label_column)
        for split in task.splits:
            path = find_split(folder, split)
            check_columns(path, *chosen)
            check_columns(path, *task.columns, can_choose=False)
        changes["data"] = str(folder)
    if train.model is not None and is_local(train.model):
        folder = _folder("--model", train.model)
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"--model {train.model!r} holds no config.json",
                "give a folder that save_pretrained wrote",
            )
        if not any(folder.glob("*.safetensors")):
            raise no_safetensors(train.model)
        changes["model"] = str(folder)
    return dataclasses.replace(train, **changes)


def no_safetensors(model: str) -> UsageError:
    """What to say of a model whose weights are pickles, or absent."""
    convert = (
        f"from transformers import AutoModel as M; "
        f"M.from_pretrained({model!r}, use_safetensors=False).save_pretrained('safe')"
    )
    return UsageError(
        f"--model {model!r} has no weights in safetensors; pickles (.bin) can run any code, and "
        "are not loaded",
        f"if you trust it: python -c {shlex.quote(convert)}, copy the tokenizer's files there, "
        "and give --model safe",
    )


def check_given(train: TrainConfig) -> None:
    """Raises UsageError where a task has no data of its own, and is given none."""
    if train.data is None and TASKS[train.task].splits:
        raise UsageError(f"--task {train.task} needs data of your own", "give --data ID|DIR")


def check_columns(path: Path, *names: str | None, can_choose: bool = True) -> None:
    """Makes sure that a data file has these columns; flags name them, or the task does.

    Raises:
        UsageError: it lacks one, has no rows, or cannot be read.
    """
    found = columns(path)
    for name in names:
        if name is not None and name not in found:
            raise no_column(str(path), name, found, can_choose)


def columns(path: Path) -> list[str]:
    """The columns of a data file, from its head.

    Raises:
        UsageError: the file cannot be read, or has no rows.
    """
    try:
        if path.suffix == ".parquet":
            return _parquet_columns(path)
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            lines = (line for line in file if line.strip())
            head, first = next(lines, ""), next(lines, "")
        if path.name.removesuffix(".gz").endswith(".csv"):
            names = next(csv.reader([head]), [])
            empty = not first
        else:
            row = json.loads(head) if head else {}
            names = list(row) if isinstance(row, dict) else []
            empty = not names
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    if empty:
        raise UsageError(f"{str(path)!r} has no rows")
    return names


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet  # 100 ms: only a parquet file pays for it

    found = pyarrow.parquet.ParquetFile(path)
    if found.metadata.num_rows == 0:
        raise UsageError(f"{str(path)!r} has no rows")
    return list(found.schema_arrow.names)


def no_column(where: str, name: str, found: list[str], can_choose: bool = True) -> UsageError:
    flags = "; choose with --text-column, --text-pair-column, --label-column" if can_choose else ""
    return UsageError(f"{where!r} has no column {name!r}", f"it has {', '.join(found)}{flags}")


def find_split(folder: Path, split: str) -> Path:
    """The file of one split of a local data set.

    Raises:
        UsageError: the folder has none of the names that it could have.
    """
    names = [split + suffix for suffix in SUFFIXES]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise UsageError(
            f"the data folder {str(folder)!r} has no {split} file", f"looked for {', '.join(names)}"
        )
    if len(found) > 1:
        raise UsageError(
            f"the data folder {str(folder)!r} has more than one {split} file: "
            + ", ".join(path.name for path in found),
            "leave one of them there",
        )
    return found[0]


def _folder(flag: str, name: str) -> Path:
    path = absolute(name)
    if not path.is_dir():
        raise UsageError(
            f"{flag} {name!r}: no such folder", "give a folder that exists, or a hub id"
        )
    return path
