"""The sizes of batches that memory held in an earlier run of the same model, for the next one."""

import itertools
from pathlib import Path
from typing import Any

from slurmft.core.config import RunConfig
from slurmft.core.decode import read
from slurmft.core.errors import UsageError
from slurmft.core.files import is_number
from slurmft.core.options import flag, own_options
from slurmft.core.run_files import SampleLimits
from slurmft.core.text import some
from slurmft.runs import scan
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.train.config import TrainConfig

_MOST_RUNS = 100
"""How many runs are looked at, the newest: a folder may have thousands."""


def notes(config: RunConfig) -> list[str]:
    """Returns what a submission should know of the newest run of the same model whose memory did
    not hold its batches; nothing where it asks for no more than that memory has held."""
    settings = config.program.settings
    newest = scan.newest_first(Path(config.job.runs_dir))
    for path in itertools.islice(newest, _MOST_RUNS):
        run = _limited_run(path, settings.get("model"))
        if run is None or not _asks_for_more(settings, run):
            continue
        differing = _differing(settings, run.settings)
        others = ""
        if differing:
            others = f"; it had other values of {some(differing)}"
        held = run.held_in_words()
        return [f"memory of {run.name}, a run of this model, held {held}{others}"]
    return []


def _limited_run(path: Path, model: Any) -> MeasuredRun | None:
    """Returns the user's own finished run of a model, if its memory did not hold its batches."""
    if not _has_own_limits(path):
        return None
    try:
        run = MeasuredRun.read(path, with_environment=False)
    except UsageError:
        return None
    # What a run wrote that has not finished may never have fitted.
    if run.value("model") != model or not run.is_finished or not run.held_samples:
        return None
    return run


def _has_own_limits(path: Path) -> bool:
    """Returns whether a run is the user's own, and memory has set it limits."""
    run = RunDir(path)
    # The names of others' runs, and what they have written, are not this user's concern: their
    # folders may be closed.
    return run.is_own() and run.memory.exists()


def _asks_for_more(settings: dict[str, Any], run: MeasuredRun) -> bool:
    """Returns whether a batch of a submission is larger than the memory of a run has held."""
    for option, samples in run.held_samples.items():
        # auto takes what fits.
        if is_number(settings[option]) and settings[option] > samples:
            return True
    return False


def remembered(config: RunConfig) -> int | None:
    """Returns the samples at a time that memory has held in the newest run of the same model that
    knows it: where --batch-size auto begins."""
    model = config.program.settings.get("model")
    newest = scan.newest_first(Path(config.job.runs_dir))
    for path in itertools.islice(newest, _MOST_RUNS):
        if not _has_own_limits(path):
            continue
        limits = read(RunDir(path).memory, SampleLimits)
        try:
            run = MeasuredRun.read(path, with_environment=False)
        except UsageError:
            continue
        is_like = run.value("model") == model and run.is_finished
        if is_like and limits is not None and limits.train_samples:
            return limits.train_samples
    return None


def _differing(settings: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Returns the flags of options that may decide how much memory a batch takes, and that are not
    as they were."""
    flags = []
    for name, each in own_options(TrainConfig).items():
        # Of sizes that count, the note speaks itself.
        decides = each.affects_speed and each.counts is None
        if decides and _plain(settings.get(name)) != _plain(before.get(name)):
            flags.append(flag(name))
    return flags


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return value
