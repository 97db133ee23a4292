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


Tables = dict[str, dict[str, Any]]
"""Recipe -> values."""


def _read_recipes() -> tuple[Tables, Tables, Tables]:
    path = Path(__file__).with_suffix(".toml")
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    recipes: Tables = {}
    # A base stands before the recipes that are made from it.
    for name, values in tables["recipes"].items():
        base = values.pop("base", None)
        inherited = recipes[base] if base else {}
        recipes[name] = inherited | values
    return recipes, tables["changes"], tables["published"]


RECIPES, CHANGES, PUBLISHED = _read_recipes()
"""Recipe -> task, preset, and the values of other options. Recipe -> what of it is not as
published. Recipe -> what else its text says."""


def named() -> list[str]:
    """Returns the recipes that are more than the defaults of their task."""
    return [name for name in RECIPES if name not in TASKS]


def of_table(table: str, task: str | None) -> str | None:
    """Returns the recipe by which the rows of a published table were measured, those of a task
    where it has several; None where no recipe is of that table."""
    names = [name for name, facts in PUBLISHED.items() if facts["table"] == table]
    if len(names) > 1:
        names = [name for name in names if RECIPES[name]["task"] == task]
    return names[0] if names else None


def as_published(name: str, nodes: int | None) -> dict[str, Any]:
    """Returns the values of a recipe as it was published for so many nodes."""
    single_node = {}
    if nodes in (None, 1):
        single_node = PUBLISHED.get(name, {}).get("single_node", {})
    return RECIPES[name] | single_node


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
        recipe = _default_recipe(task, given)
    # A rate that is given is the user's: it is put over the recipe's below, as it is.
    if given.get("lora"):
        for name in recipe.keys() & {"learning_rate", "muon_learning_rate"}:
            recipe[name] *= _LORA_FACTOR
    # The size of a step that is given goes before what a recipe says of it.
    if given.get("global_batch_size"):
        recipe.pop("max_global_batch_size", None)
        recipe.pop("gradient_accumulation_steps", None)
    return recipe | given


def _named_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of --recipe."""
    name = given["recipe"]
    if name not in RECIPES:
        raise unknown("--recipe", name, list(RECIPES), page="tasks")
    for key in ("task", "preset"):
        value = RECIPES[name][key]
        if given.get(key, value) != value:
            raise UsageError(
                f"--recipe {name} has the {key} {value}, not {given[key]}",
                f"leave out --{key}",
            )
    return _values_of(name, given)


def _values_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a recipe, with our changes where they are not to be left out."""
    if given.get("as_published"):
        return as_published(name, given.get("nodes"))
    return RECIPES[name] | CHANGES.get(name, {})


def _default_recipe(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the first recipe of a task and a preset, with its name."""
    preset = given.get("preset")
    if task not in TASKS:
        defaults = dict(own_task.facts(task).defaults)
        identity = {"task": task, "recipe": None, "preset": preset}
        # What a task of the user's own does not say is as in text classification.
        return RECIPES["text-classification"] | defaults | identity
    known_presets = presets(task)
    if preset is None:
        preset = known_presets[0]
    if preset not in known_presets:
        raise unknown(f"--preset of --task {task}:", preset, known_presets)
    for name, recipe in RECIPES.items():
        if (recipe["task"], recipe["preset"]) == (task, preset):
            return _values_of(name, given) | {"recipe": name}
    raise AssertionError(f"no recipe of {task}, {preset}")
