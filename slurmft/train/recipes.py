"""Tasks and recipes (recipes.toml): the torch-free half of a task, for the login node.

The compute half (rows, features, model, metric) is a module of `slurmft.train.tasks`. A recipe's
value stands until the site file or a flag overrides it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """What the login node knows of a task."""

    module: str = "sequence"
    """Where its compute half is, in `slurmft.train.tasks`: the class `Task`."""
    splits: tuple[str, ...] = ("train", "validation")
    """Its files; none: its data is generated."""
    rows: Any = "Texts"
    """What its rows are: a class of `slurmft.train.login.formats`, by its name, or an own one."""
    rows_are_samples: bool = True
    """Whether each row is one sample, and not a part of a long text."""
    labels: tuple[str, ...] | None = None
    """Names of the classes; none: labels are numbers; None: those that the training data has."""
    pipeline: str = "text-classification"
    """What the hub calls it; "": as its preset."""
    packages: tuple[str, ...] = ()
    """Optional packages that it needs."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Where it has labels: names in `slurmft.train.tasks.metrics`, of which the first decides which
    checkpoint is the best."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of an own task: options whose defaults are not those of text-classification."""


def _read() -> tuple[dict[str, TaskFacts], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    with open(Path(__file__).with_suffix(".toml"), "rb") as file:
        tables = tomllib.load(file)
    tasks = dict[str, TaskFacts]()
    for name, facts in tables["tasks"].items():
        own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        tasks[name] = TaskFacts(**own)
    recipes: dict[str, dict[str, Any]] = {}
    for name, own in tables["recipes"].items():
        base = recipes[own.pop("base")] if "base" in own else {}
        recipes[name] = base | own
    return tasks, recipes, tables["changes"]


TASKS, RECIPES, CHANGES = _read()
"""Task -> its facts. Recipe -> task, preset, and the values of other flags. Recipe -> what of it
is not as published."""


def facts(task: str) -> TaskFacts:
    """Those of a task; UsageError where there is no such task."""
    if task in TASKS:
        return TASKS[task]
    from slurmft.train import own_task

    found: TaskFacts = own_task.load(task).facts
    return found


def named() -> list[str]:
    """The recipes that are more than their task's default."""
    return [name for name in RECIPES if name not in TASKS]


def presets(task: str) -> list[str]:
    """Names of a task's presets, the default one first."""
    return list(dict.fromkeys(r["preset"] for r in RECIPES.values() if r["task"] == task))


def fill(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the recipe that is named, or else is its task's and preset's; over them those
    that are given. UsageError where there is no such name, or the recipe is for another task.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if words := given.get("task_option"):
        from slurmft.train import own_task

        task = given.get("task", "synthetic")
        own_task.options(None if task in TASKS else own_task.load(task), task, words)
    if "recipe" not in given:
        return _rates(_default(given.get("task", "synthetic"), given.get("preset")), given) | given
    name = given["recipe"]
    if name not in RECIPES:
        raise unknown("--recipe", name, list(RECIPES))
    for key in ("task", "preset"):
        its = RECIPES[name][key]
        if given.get(key, its) != its:
            raise UsageError(
                f"--recipe {name} has the {key} {its}, not {given[key]}", f"leave out --{key}"
            )
    changes = {} if given.get("as_published") else CHANGES.get(name, {})
    return _rates(RECIPES[name] | changes, given) | given


def _rates(recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Adapters take about 10 times the learning rate that is right for all weights."""
    factor = 10 if given.get("lora") else 1
    return {k: factor * v if k.endswith("learning_rate") else v for k, v in recipe.items()}


def _default(task: str, preset: str | None) -> dict[str, Any]:
    if task not in TASKS:
        own = {"task": task, "recipe": None, "preset": preset}
        return RECIPES["text-classification"] | dict(facts(task).defaults) | own
    preset = preset or presets(task)[0]
    if preset not in presets(task):
        raise unknown(f"preset of task {task}", preset, presets(task))
    name = next(name for name, r in RECIPES.items() if (r["task"], r["preset"]) == (task, preset))
    return RECIPES[name] | {"recipe": name}
