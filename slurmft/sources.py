"""Where models and data come from: local folders first, the Hugging Face hub otherwise."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from slurmft.config import TrainConfig
from slurmft.errors import UsageError

SPLITS = ("train", "validation")
SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")


def is_local(name: str) -> bool:
    """Whether a model or data set is meant as a folder: it is one, or it can be no hub id."""
    hub_id = re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name, re.ASCII)
    return hub_id is None or Path(name).expanduser().exists()


def localize(train: TrainConfig) -> TrainConfig:
    """The configuration with local folders checked and made absolute: nodes start elsewhere.

    Raises:
        UsageError: a folder that does not exist, or lacks the files of a model or a data set.
    """
    changes = {}
    if train.data is not None and is_local(train.data):
        folder = _folder("--data", train.data)
        for split in SPLITS:
            find_split(folder, split)
        changes["data"] = str(folder)
    if train.model is not None and is_local(train.model):
        folder = _folder("--model", train.model)
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"--model {train.model!r} holds no config.json",
                "give a folder that save_pretrained wrote",
            )
        changes["model"] = str(folder)
    return dataclasses.replace(train, **changes)


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
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(
            f"{flag} {name!r}: no such folder", "give a folder that exists, or a hub id"
        )
    return path.absolute()
