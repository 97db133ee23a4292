"""Fills the caches for nodes without internet. It downloads a model and a data set by the same
calls as a run, and checks that they load without the hub.

examples:
  slurmft fetch --task emotion                                  what its recipe names
  slurmft fetch roberta-base --task mrpc                        another model, the recipe's data
  slurmft fetch distilbert-base-uncased dair-ai/emotion
  slurmft fetch me/model me/texts --task text-classification

The caches are where $HF_HOME says; jobs must see the same folder. Local folders are only checked.
"""

import argparse
import os
import subprocess
import sys

from slurmft.cli.parser import Parser
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import to_json
from slurmft.core.hub import is_local
from slurmft.core.options import build
from slurmft.train import recipes
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from slurmft.train.task_facts import TASKS


def parser() -> Parser:
    command = Parser("slurmft fetch", __doc__)
    command.add_argument("model", nargs="?", help="hub id or folder (default: the task's)")
    command.add_argument("data", nargs="?", help="hub id or folder (default: the task's)")
    task = "what they are for (default: emotion)"
    command.add_argument("--task", choices=tuple(TASKS), metavar="NAME", help=task)
    return command


def configure(arguments: argparse.Namespace) -> TrainConfig:
    """What a run of the task would load."""
    given = {k: v for k in ("task", "model", "data") if (v := getattr(arguments, k)) is not None}
    if not given:
        raise UsageError("nothing to fetch", "slurmft fetch MODEL DATASET, or --task NAME")
    train = localize(build(TrainConfig, recipes.fill({"task": "emotion"} | given)))
    inputs.check(train)
    if train.model is None and train.data is None:
        raise UsageError(f"--task {train.task} needs nothing from the hub")
    return train


def load(train: TrainConfig, offline: bool) -> None:
    """Loads all in a process of its own, which downloads what the caches lack, unless offline."""
    values = {k: getattr(train, k) for k in ("task", "model", "data")}
    command = [sys.executable, "-m", "slurmft.train.prefetch", to_json(values)]
    env = os.environ | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        what = "the caches are not enough without the hub" if offline else "not fetched"
        raise SlurmftError(what, "see above; a job on the nodes would fail the same way")


def main(argv: list[str]) -> int:
    """The command: download, then load again without the hub."""
    train = configure(parser().parse(argv))
    names = list(filter(None, (train.model, train.data)))
    for name in filter(is_local, names):
        print(f"{name}: a folder, nothing to fetch")
    if not all(map(is_local, names)):
        print("fetching", flush=True)
        load(train, offline=False)
    print("loading without the hub", flush=True)
    load(train, offline=True)
    return Exit.OK
