"""Recipes (recipes.toml): a task with the values of its other options.

A recipe's value stands until the site file or a flag overrides it.
"""

import tomllib
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError, unknown
from slurmft.train import own_task
from slurmft.train.task_facts import TASKS

_LORA_FACTOR = 10
"""Adapters take about 10 times the learning rate that is right for all weights."""


def _read_recipes() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    path = Path(__file__).with_suffix(".toml")
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    recipes: dict[str, dict[str, Any]] = {}
    # A base stands before the recipes that are made from it.
    for name, values in tables["recipes"].items():
        base = values.pop("base", None)
        inherited = recipes[base] if base else {}
        recipes[name] = inherited | values
    return recipes, tables["changes"]


RECIPES, CHANGES = _read_recipes()
"""Recipe -> task, preset, and the values of other options. Recipe -> what of it is not as
published."""


def named() -> list[str]:
    """Returns the recipes that are more than the defaults of their task."""
    return [name for name in RECIPES if name not in TASKS]


def presets(task: str) -> list[str]:
    """Returns the names of a task's presets, the default one first."""
    names = [recipe["preset"] for recipe in RECIPES.values() if recipe["task"] == task]
    # Each once, in the order of the file: a preset may have several recipes.
    return list(dict.fromkeys(names))


def fill(given: dict[str, Any]) -> dict[str, Any]:
    """Returns `given` with the values of a recipe for what is not given.

    The recipe is the one that is named, or else that of the task and the preset.

    Raises:
        UsageError: there is no such recipe, task or preset, or the recipe is for another task.
    """
    given = {name: value for name, value in given.items() if value is not None}
    task = given.get("task", "synthetic")
    settings = given.get("task_option")
    if settings:
        task_class = None  # our own tasks have no options of this kind
        if task not in TASKS:
            task_class = own_task.load(task)
        # raises for what the task does not have
        own_task.options(task_class, task, settings)
    if "recipe" in given:
        recipe = _named_recipe(given)
    else:
        recipe = _default_recipe(task, given.get("preset"))
    # A rate that is given is the user's: it is put over the recipe's below, as it is.
    if given.get("lora"):
        for name in recipe.keys() & {"learning_rate", "muon_learning_rate"}:
            recipe[name] *= _LORA_FACTOR
    return recipe | given


def _named_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of --recipe."""
    name = given["recipe"]
    if name not in RECIPES:
        raise unknown("--recipe", name, list(RECIPES))
    for key in ("task", "preset"):
        value = RECIPES[name][key]
        if given.get(key, value) != value:
            raise UsageError(
                f"--recipe {name} has the {key} {value}, not {given[key]}",
                f"leave out --{key}",
            )
    if given.get("as_published"):
        return dict(RECIPES[name])
    changes = CHANGES.get(name, {})
    return RECIPES[name] | changes


def _default_recipe(task: str, preset: str | None) -> dict[str, Any]:
    """Returns the values of the first recipe of a task and a preset, with its name."""
    if task not in TASKS:
        defaults = dict(own_task.facts(task).defaults)
        identity = {"task": task, "recipe": None, "preset": preset}
        # What a task of the user's own does not say is as in text classification.
        return RECIPES["text-classification"] | defaults | identity
    known_presets = presets(task)
    if preset is None:
        preset = known_presets[0]
    if preset not in known_presets:
        raise unknown(f"preset of task {task}", preset, known_presets)
    for name, recipe in RECIPES.items():
        if (recipe["task"], recipe["preset"]) == (task, preset):
            return recipe | {"recipe": name}
    raise AssertionError(f"no recipe of {task}, {preset}")
