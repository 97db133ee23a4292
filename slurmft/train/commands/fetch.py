"""Fills the caches for nodes without internet. It downloads a model and a data set by the same
calls as a run, and checks that they load without the hub.

examples:
  slurmft fetch --task emotion                                  what its recipe names
  slurmft fetch roberta-base --task mrpc                        another model, the recipe's data
  slurmft fetch distilbert-base-uncased dair-ai/emotion
  slurmft fetch me/model me/texts --task text-classification --text-column body
  slurmft fetch --metric f1 --metric rouge                      metrics of the package evaluate

The caches are where $HF_HOME says; jobs must see the same folder. Local folders are only checked.
"""

import argparse
import dataclasses
import subprocess
from collections.abc import Iterable

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, typed_options
from slurmft.core import interpreter, process
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import to_json
from slurmft.core.hub import (
    NO_HUB_CURE,
    endpoint,
    hub_in_reach,
    is_hub_offline,
    is_local,
)
from slurmft.core.options import build, options
from slurmft.train import metric_spec, own_task, recipes
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login import metrics as login_metrics
from slurmft.train.login.caches import environment_of_caches
from slurmft.train.login.sources import check_installed, localize

ELSEWHERE = Elsewhere.PLAIN


def parser() -> Parser:
    command = Parser("slurmft fetch", __doc__)
    command.add_argument(
        "model",
        nargs="?",
        help="hub id or folder (default: the task's)",
    )
    command.add_argument(
        "data",
        nargs="?",
        help="hub id or folder (default: the task's)",
    )
    task = "what they are for (default: emotion)"
    # Not checked here: the task may be of another package, which `recipes.fill` looks up.
    command.add_argument("--task", metavar="NAME", help=task)
    command.add_argument(
        "--metric",
        metavar="NAME",
        action="append",
        help="a metric of the package evaluate, by its name on the hub; repeatable",
    )
    names = [
        name for name, each in options(TrainConfig).items() if "fetch" in each.commands
    ]
    return command.add_options(TrainConfig, "how the data is read", names)


def configure(arguments: argparse.Namespace) -> TrainConfig:
    """Returns the configuration of a run that would load what is to be fetched.

    Raises:
        UsageError: the arguments name nothing, or nothing of the hub; a local folder is not as a
            run needs it.
    """
    names = options(TrainConfig).keys() - {"metric"}
    typed = typed_options(arguments, names)
    flags = {}
    for name, value in typed.items():
        if value is not None:
            flags[name] = value
    # How data is read names none.
    if all(_is_of_reading(name) for name in flags):
        raise UsageError(
            "nothing to fetch", "slurmft fetch MODEL DATASET, or --task NAME"
        )
    # The recipe of the task fills in the model or the data that the command line leaves out.
    values = recipes.fill({"task": "emotion"} | flags)
    train = build(TrainConfig, values)
    train = localize(train)
    # Local files are looked at as at a submission; only the hub's are fetched.
    inputs.check(train)
    if train.model is None and train.data is None:
        raise UsageError(f"--task {train.task} needs nothing from the hub")
    return train


def _is_of_reading(name: str) -> bool:
    """Returns whether an option says how data is read, and not which."""
    declared = options(TrainConfig)[name]
    return "fetch" in declared.commands and declared.path is None


def load(train: TrainConfig, offline: bool) -> int:
    """Loads model and data in a process of its own, which prints what is wrong; returns its exit
    code.

    Args:
        offline: download nothing; otherwise what the caches lack is downloaded.

    Raises:
        SlurmftError: the process was killed.
    """
    settings = to_json(dataclasses.asdict(train))
    command = interpreter.module("slurmft.train.prefetch", settings)
    environment = environment_of_caches()
    if offline:
        # The libraries read it when they are imported: hence another process than the first.
        environment["HF_HUB_OFFLINE"] = "1"
    # Its output goes to the terminal: progress bars, and the reason where it fails.
    done = subprocess.run(command, env=environment, check=False)
    # A signal ended it: the kernel's SIGKILL, mostly, where memory is short.
    if done.returncode < 0:
        name = process.signal_name(-done.returncode)
        raise SlurmftError(
            f"the process that loads the model was ended by {name}",
            "fetch where there is more memory: the model is loaded whole",
        )
    return done.returncode


def fetch_metrics(texts: list[str]) -> None:
    """Downloads the scripts of metrics, and what they load; then loads them without the hub.

    Raises:
        UsageError: one of them cannot be loaded.
    """
    check_installed({"--metric": ("evaluate",)})
    names = [metric_spec.localized(text) for text in texts]
    of_hub = [spec for spec in metric_spec.parsed(names) if not spec.is_local]
    modules = metric_spec.modules_folder()
    absent = [spec.text for spec in of_hub if not metric_spec.is_cached(spec, modules)]
    # Where it does not answer, evaluate says that it has no such metric.
    if absent and not _hub_answers():
        raise UsageError(
            f"--metric {', '.join(absent)} cannot be fetched without the hub",
            NO_HUB_CURE,
        )
    print("fetching metrics", flush=True)
    # Those of the cache, too: the hub may have a newer script.
    for offline, metrics in ((False, [spec.text for spec in of_hub]), (True, names)):
        if not metrics:
            continue
        lines = login_metrics.fetch(metrics, offline)
    for line in lines:
        print(line, flush=True)


def main(argv: list[str]) -> int:
    """Downloads what the caches lack, then loads all again without the hub."""
    arguments = parser().parse(argv)
    preset = typed_options(arguments, ["preset"]).get("preset")
    scripts = _scripts(arguments.metric or (), arguments.task, preset)
    if scripts:
        fetch_metrics(scripts)
    # Metrics alone were asked for: the model and the data of the default task were not.
    if arguments.metric and not (arguments.model or arguments.data or arguments.task):
        return Exit.OK
    train = configure(arguments)
    needs_hub = False
    for name in (train.model, *(source.data for source in train.sources())):
        if name is None:
            continue
        if is_local(name):
            print(f"{name}: a folder, nothing to fetch")
        else:
            needs_hub = True
    # Without an answer, each of their files would be tried for 20 s.
    if needs_hub and _hub_answers():
        print("fetching", flush=True)
        code = load(train, offline=False)
        if code:
            return code
    # A run on nodes without internet does this: what passes here finds its files there.
    print("loading without the hub", flush=True)
    return load(train, offline=True)


def _scripts(texts: Iterable[str], task: str | None, preset: str | None) -> list[str]:
    """Returns the values of --metric that need a script: neither the loss nor, where the task is
    given, one of its own metrics."""
    own_names: tuple[str, ...] = (metric_spec.LOSS,)
    if task:
        own_names += own_task.metrics_of_presets(task, preset)
    return [text for text in texts if metric_spec.own_metric(text, own_names) is None]


def _hub_answers() -> bool:
    """Returns whether the hub answers; says which one is asked, and what follows if it does not."""
    if is_hub_offline():
        print("HF_HUB_OFFLINE is set: the hub is not asked", flush=True)
        return False
    print(f"asking {redact(endpoint())}", flush=True)
    if hub_in_reach():
        return True
    print("it does not answer this machine: only the caches are left", flush=True)
    return False
