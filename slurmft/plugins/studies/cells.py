"""Cells: runs that measure the same thing, and the settings in which measurements differ.

Which settings these are is read from the declarations of the options: runs that differ only in
options that affect nothing, or in their seed, are repeats of one measurement.
"""

from collections.abc import Iterable
from typing import Any

from slurmft.core.config import JobConfig
from slurmft.core.options import Option, options
from slurmft.core.program import kind_class
from slurmft.programs.description import FLAGS
from slurmft.runs.scan import MeasuredRun
from slurmft.train.config import TrainConfig

_TRAINING = options(TrainConfig) | options(JobConfig)
_OWN_PROGRAM = FLAGS | options(JobConfig)

DEVICE_FIELDS = tuple(name for name, each in _TRAINING.items() if each.counts == "devices")
"""Options that say on how many devices a run is: nodes first, then what each has."""
BATCH_FIELDS = tuple(name for name, each in _TRAINING.items() if each.counts == "batch")
"""Options that say how many samples a step takes."""
COST_FIELDS = tuple(
    name for name, each in _TRAINING.items() if each.affects_speed and each.counts is None
)
"""Options that the time of a step depends on, but for the sizes that the cost model knows."""


def declarations(run: MeasuredRun) -> dict[str, Option]:
    """Returns the options that a run has."""
    return _OWN_PROGRAM if run.is_own else _TRAINING


def fields_of(run: MeasuredRun) -> dict[str, Any]:
    """Returns the settings in which measurements differ, and repeats do not.

    Of a program of the user's own these are the placeholders of its study, or its arguments, and
    the options of its job.
    """
    cell = (run.study or {}).get("cell")
    kind = kind_class(str(run.config["program"].get("kind")))
    settings = kind.varied(run.settings, cell if isinstance(cell, dict) else None)
    declared = declarations(run)
    return {
        name: value
        for name, value in (settings | run.config["job"]).items()
        if name not in ("seed", "--seed")  # repeats have seeds of their own
        and (name not in declared or declared[name].affects_measurement)
    }


def varied(runs: Iterable[MeasuredRun]) -> list[str]:
    """Returns the settings that are not the same in all runs."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for field, value in fields_of(run).items():
            values.setdefault(field, set()).add(repr(value))
    return [field for field, texts in values.items() if len(texts) > 1]


def cells(runs: Iterable[MeasuredRun]) -> list[list[MeasuredRun]]:
    """Groups runs by measurement: the runs of a group are repeats."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(fields_of(run).items())), []).append(run)
    return list(groups.values())
