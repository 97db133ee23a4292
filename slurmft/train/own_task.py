"""Tasks of the user's own: `--task package.module:Class`, or an entry point of `slurmft.tasks`.

Such a task is a subclass of `slurmft.train.tasks.Task` (or of `Pretrained` there, which loads rows,
tokenizer and model). Its attribute `facts` says what the login node has to know of it. The module
is imported on the login node, too: it should import torch only where it computes.
"""

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from slurmft.core import descent, interpreter, plugins
from slurmft.core.errors import UsageError, one_line, unknown
from slurmft.core.options import TYPE_NAMES
from slurmft.train.task_facts import TASKS, TaskDeclaration, TaskFacts

_imports_from_here = True


@functools.cache
def load(name: str) -> Any:
    """Returns the class that --task names.

    Raises:
        UsageError: it cannot be imported, or is no whole task.
    """
    what = f"--task {name}"
    try:
        task_class = _import_class(name)
    except UsageError:  # it says by itself what is wrong
        raise
    except Exception as error:  # whatever the module does when it is imported
        raise UsageError(
            f"{what} cannot be imported: {one_line(error)}",
            "give package.module:Class as Python imports it from this folder",
        ) from error
    # By the base of `Task`, which this module can import without numpy.
    if not (inspect.isclass(task_class) and issubclass(task_class, TaskDeclaration)):
        problem = f"{what} is no subclass of slurmft.train.tasks.Task"
        raise UsageError(problem, "derive it from that")
    missing_methods = sorted(task_class.__abstractmethods__)
    if missing_methods:
        names = ", ".join(f"{method}()" for method in missing_methods)
        raise UsageError(f"{what} lacks {names}", "write it")
    if not isinstance(getattr(task_class, "facts", None), TaskFacts):
        raise UsageError(
            f"{what} lacks facts, which say what its rows are",
            "facts = TaskFacts(...), with slurmft.train.tasks.TaskFacts",
        )
    return task_class


def check_predicts(name: str) -> None:
    """Checks that `slurmft predict` can predict with a task's model.

    Raises:
        UsageError: a task of the user's own lacks what that needs.
    """
    if name in TASKS:
        return
    task_class = load(name)
    what = f"--task {name} cannot predict the rows of a file"
    if not hasattr(task_class, "unlabelled"):
        raise UsageError(
            f"{what}: it has no unlabelled(), which makes tokens of rows without labels",
            "write it, or derive the task from slurmft.train.tasks.Pretrained",
        )
    if hasattr(task_class, "prediction_columns"):
        return
    for method in ("evaluate", "predict"):
        module = getattr(task_class, method).__module__
        if not module.startswith("slurmft.train.tasks."):
            raise UsageError(
                f"{what}: it has its own {method}(), and no prediction_columns()",
                "write that; it returns the columns that predictions add to the file",
            )


def _import_class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if attribute:
        # as `python -m` does, and console scripts do not
        if _imports_from_here:
            interpreter.import_from(descent.opened_working_folder())
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
        return target
    entry = plugins.find(plugins.TASKS, name)
    if entry is None:
        raise _unknown_task(name)
    return entry.load()


_ELSEWHERE = {
    "sentiment": "text-classification",
    "sentiment-analysis": "text-classification",
    "sequence-classification": "text-classification",
    "nli": "text-classification",
    "multilabel": "multi-label",
    "ner": "token-classification",
    "pos": "token-classification",
    "tagging": "token-classification",
    "qa": "squad",
    "question-answering": "squad",
    "extractive-qa": "squad",
    "summarization": "seq2seq",
    "text2text-generation": "seq2seq",
    "clm": "causal-lm",
    "language-modeling": "causal-lm",
    "pretraining": "causal-lm",
    "text-generation": "sft",
    "instruct": "sft",
    "instruction-tuning": "sft",
    "chat": "sft",
    "similarity": "embeddings",
    "feature-extraction": "embeddings",
    "sentence-transformers": "embeddings",
    "retrieval": "embeddings",
    "cross-encoder": "reranker",
    "ranking": "reranker",
    "text-ranking": "reranker",
}
"""What other tools call a task -> our name."""
_NO_TASKS = {
    "glue": "each of its tasks by its name: --task mrpc, --task qqp, ...",
    "translation": "that is --recipe translation here",
    **dict.fromkeys(
        ("dpo", "ppo", "grpo", "orpo", "kto", "rlhf", "reward"),
        "preferences are learnt by no task: a script of your own can, by slurmft run",
    ),
    **dict.fromkeys(
        ("mlm", "masked-lm", "fill-mask"),
        "no task has masked tokens: a script of your own can, by slurmft run",
    ),
}
"""What other tools call a task, and is none here -> what to do."""


def _unknown_task(name: str) -> UsageError:
    """Returns the error for a task that is unknown; its hint knows the names of other tools."""
    plain = name.lower().replace("_", "-")
    hint = _NO_TASKS.get(plain)
    if plain in _ELSEWHERE:
        hint = f"that is --task {_ELSEWHERE[plain]} here"
    for ours in plugins.entries(plugins.TASKS):
        if plain.replace("-", "") == ours.replace("-", ""):
            hint = f"did you mean {ours}?"
    if hint is not None:
        return UsageError(f"unknown --task {name!r}", hint)
    names = ["package.module:Class", *plugins.entries(plugins.TASKS)]
    return unknown("--task", name, names, page="tasks")


def facts(name: str) -> TaskFacts:
    """Returns the facts of a task, be it ours or the user's own.

    Raises:
        UsageError: there is no such task.
    """
    if name in TASKS:
        return TASKS[name]
    own_facts: TaskFacts = load(name).facts
    return own_facts


def metrics(name: str, preset: str | None) -> tuple[str, ...]:
    """Returns the names of the metrics that a task computes, those of other data last; raises as
    `facts`."""
    task_facts = facts(name)
    names = task_facts.metrics_of(preset)
    if name not in TASKS:
        names = load(name).metric_names or names
    elif len(task_facts.suffixes) > 1:
        names = tuple(
            metric + suffix for suffix in task_facts.suffixes for metric in names
        )
    return tuple(dict.fromkeys(names + task_facts.data_metrics))


def metrics_of_presets(name: str, preset: str | None) -> tuple[str, ...]:
    """Returns the names of the metrics that a task computes with a preset; None: with any of its
    presets. Raises as `facts`."""
    if preset is not None:
        return metrics(name, preset)
    presets = (None, *facts(name).preset_metrics)
    return tuple(metric for preset in presets for metric in metrics(name, preset))


def code(name: str) -> str:
    """Returns the folder that the module of an own task is imported from.

    It is "" for a task that comes with slurmft, and for one that is installed.
    """
    if name in TASKS:
        return ""
    task_class = load(name)
    # Of package.module it is the folder that has the package.
    depth = task_class.__module__.count(".")
    folder = Path(inspect.getfile(task_class)).resolve().parents[depth]
    # An installed task needs no copy: ranks import from the same environment.
    for kind in ("purelib", "platlib"):
        # Resolved, as `folder` is: an environment may be reached by a link.
        site_packages = os.path.realpath(sysconfig.get_path(kind))
        if folder == Path(site_packages):
            return ""
    return str(folder)


def use_code(folder: str) -> None:
    """Lets the tasks of a run be imported from the folder of its code, or, where that is "", from
    what is installed: never from the present folder, which may hold anything."""
    global _imports_from_here
    _imports_from_here = False
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)


def use_present_folder() -> None:
    """Lets the tasks of a new training be imported from the present folder, too."""
    global _imports_from_here
    _imports_from_here = True


def options(task_class: Any, task: str, settings: tuple[str, ...]) -> Any:
    """Returns the own options of a task as its dataclass `Options`; None if it has no such class.

    Args:
        settings: NAME=VALUE of each --task-option.

    Raises:
        UsageError: the task has no option of that name, or the value is of another type.
    """
    options_class = task_class.Options if task_class else None
    fields = {}
    if options_class:
        fields = {each.name: each for each in dataclasses.fields(options_class)}
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.replace("-", "_")
        if name not in fields or not equals:
            defaults = [f"{field_name}={f.default}" for field_name, f in fields.items()]
            all_defaults = ", ".join(defaults) or "none"
            raise UsageError(
                f"--task-option {setting!r}: no option of --task {task}",
                f"it has {all_defaults}",
            )
        values[name] = _parse(setting, text, type(fields[name].default))
    if options_class is None:
        return None
    return options_class(**values)


def _parse(setting: str, text: str, kind: type) -> Any:
    """Returns the value of an option, of the type of its default."""
    try:
        if kind is bool:  # bool("false") is True
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        expected = TYPE_NAMES.get(kind, kind.__name__)
        raise UsageError(f"--task-option {setting!r} must be {expected}") from None
