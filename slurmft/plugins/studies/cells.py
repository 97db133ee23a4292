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
from slurmft.train.config import AUTO, TrainConfig

_TRAINING = options(TrainConfig) | options(JobConfig)
_OWN_PROGRAM = FLAGS | options(JobConfig)


def _fields_that_count(quantity: str) -> tuple[str, ...]:
    names = []
    for name, each in _TRAINING.items():
        if each.counts == quantity:
            names.append(name)
    return tuple(names)


DEVICE_FIELDS = _fields_that_count("devices")
"""Options that say on how many devices a run is: nodes first, then what each has."""
BATCH_FIELDS = _fields_that_count("batch")
"""Options that say how many samples a step takes."""
COST_FIELDS = tuple(
    name
    for name, each in _TRAINING.items()
    if each.affects_speed and each.counts is None
)
"""Options that the time of a step depends on, but for the sizes that the cost model knows."""


def declarations(run: MeasuredRun) -> dict[str, Option]:
    """Returns the declarations of the options that a run has, by name."""
    if run.is_own_program:
        return _OWN_PROGRAM
    return _TRAINING


def fields_of(run: MeasuredRun) -> dict[str, Any]:
    """Returns the settings in which measurements differ, and repeats do not.

    Of a program of the user's own these are the placeholders of its study, or its arguments, and
    the options of its job.
    """
    cell = run.study.cell if run.study else None
    program = run.config["program"]
    kind = kind_class(program["kind"])
    settings = kind.varied(run.settings, cell) | run.config["job"]
    declared = declarations(run)
    fields = {}
    for name, value in settings.items():
        # A name without a declaration is a placeholder or an argument.
        affects = name not in declared or declared[name].affects_measurement
        # Repeats have seeds of their own; --seed is an argument of the user's program.
        if affects and name not in ("seed", "--seed"):
            fields[name] = value
    # What memory held may differ from run to run, and the time of a step with it.
    tried_size = (run.result or {}).get("batch_size")
    if fields.get("batch_size") == AUTO and tried_size:
        fields["batch_size"] = f"{AUTO}: {tried_size}"
    # On another number of nodes it is another measurement; its global batch is that of the most.
    if fields.get("min_nodes") is not None:
        fields["min_nodes"] = f"{fields['min_nodes']}-{fields['nodes']}"
        fields["nodes"] = run.nodes
    return fields


def varied(runs: Iterable[MeasuredRun]) -> list[str]:
    """Returns the settings that are not the same in all runs."""
    # By their repr(), because lists are not hashable.
    values: dict[str, set[str]] = {}
    for run in runs:
        for field, value in fields_of(run).items():
            texts = values.setdefault(field, set())
            texts.add(repr(value))
    return [field for field, texts in values.items() if len(texts) > 1]


def cells(runs: Iterable[MeasuredRun]) -> list[list[MeasuredRun]]:
    """Groups runs by measurement: the runs of a group are repeats."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        fields = fields_of(run)
        # Sorted: the same settings come in another order where a study file was rearranged.
        key = repr(sorted(fields.items()))
        members = groups.setdefault(key, [])
        members.append(run)
    return list(groups.values())
