"""How our runs differ from the published ones beside them: in model, data, precision, batching,
processes, batch and all other settings that decide a result or its speed."""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from slurmft.core.options import Option
from slurmft.plugins.studies.published import PublishedTable
from slurmft.plugins.studies.report.measures import Row, result_of
from slurmft.plugins.studies.table import setting_text
from slurmft.train import recipes
from slurmft.train.login.configure import OPTIONS

_TRAIN_SAMPLES = "train_samples"
_SAME = 0.05
"""Numbers of samples that differ by less count as the same: long texts may be several samples, and
the last batch of an epoch may be left out."""


def departures(
    published: PublishedTable,
    pairs: Iterable[tuple[Mapping[str, Any], Row]],
    fields: Mapping[str, str],
) -> list[str]:
    """Returns the settings that differ, in words: "precision bf16 (fp16)" is bf16 in our runs, fp16
    in the published ones.

    Args:
        pairs: published rows, each with a row of ours.
        fields: published column or setting -> option.
    """
    differing: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for theirs, ours in pairs:
        for name, value in _published_settings(published, theirs, ours, fields).items():
            our_value = _our_value(ours, name)
            if our_value is None or _is_same(name, value, our_value):
                continue
            # Dictionaries: each value once, in the order of the rows.
            our_values, their_values = differing.setdefault(name, ({}, {}))
            our_values[_shown(our_value)] = None
            their_values[_shown(value)] = None
    texts = []
    for name, (our_values, their_values) in differing.items():
        setting = _label(name)
        texts.append(f"{setting} {', '.join(our_values)} ({', '.join(their_values)})")
    return texts


def _published_settings(
    published: PublishedTable,
    theirs: Mapping[str, Any],
    ours: Row,
    fields: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the settings of a published row, by the names of our options: those of the recipe
    that belongs to the table, and over them those of the table itself."""
    settings: dict[str, Any] = {}
    recipe = recipes.of_table(published.file, ours.value("task"))
    if recipe:
        settings[_TRAIN_SAMPLES] = recipes.PUBLISHED[recipe].get(_TRAIN_SAMPLES)
        for name, value in recipes.as_published(recipe, ours.value("nodes")).items():
            if name in OPTIONS and _is_compared(OPTIONS[name]):
                settings[name] = value
    for name, value in {**published.setup, **theirs}.items():
        if name == _TRAIN_SAMPLES:
            settings[name] = value
        elif name in fields and _is_compared(OPTIONS[fields[name]]):
            settings[fields[name]] = value
    return {name: value for name, value in settings.items() if value is not None}


def _is_compared(option: Option) -> bool:
    """Returns whether a report names a difference in an option."""
    # A folder of the same data may have another name: the number of samples is compared instead.
    is_data = option.path == "input" and option.name != "model"
    # Names of columns and the like: the data decides them.
    names_data = option.decides_tokens and option.value_type is str
    is_settled = option.at == "submission"
    return option.affects_measurement and not (is_data or names_data or is_settled)


def _our_value(row: Row, name: str) -> Any:
    """Returns a setting of our row as its runs had it; None where that is unknown."""
    nodes = row.value("nodes")
    # As it was: where the option is not given, the node's devices decide.
    if name == "nproc_per_node" and row.devices and nodes:
        return row.devices // nodes
    if name != _TRAIN_SAMPLES:
        return row.value(name)
    for run in row.finished:
        result = result_of(run)
        samples = result.get(_TRAIN_SAMPLES)
        epochs = result.get("epochs")
        if samples and epochs:
            return round(samples / epochs)
    return None


def _is_same(name: str, theirs: Any, ours: Any) -> bool:
    """Returns whether two values of a setting are the same, written in whichever way."""
    try:
        # 5e-4 and "0.0005" are the same learning rate
        their_number = float(theirs)
        our_number = float(ours)
    except (TypeError, ValueError):
        # Of a model in a folder, the folder's name.
        return _last_part(theirs) == _last_part(ours)
    if name == _TRAIN_SAMPLES:
        return abs(their_number - our_number) <= _SAME * their_number
    return their_number == our_number


def _last_part(value: Any) -> str:
    return PurePath(str(value).lower()).name


def _shown(value: Any) -> str:
    # True and False are ints to Python, and no numbers here.
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return setting_text(value)


def _label(name: str) -> str:
    if name == "nproc_per_node":
        return "processes a node"
    return name.replace("_", " ")
