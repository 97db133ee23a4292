"""Tasks of the user's own: `--task package.module:Class`, or an entry point of `slurmft.tasks`.

Such a task is a subclass of `slurmft.train.tasks.Task` (or of `Pretrained` there, which loads rows,
tokenizer and model), with what the login node has to know of it as its attribute `facts`. The
module is imported on the login node, too: it should import torch only where it computes.
"""

import functools
import importlib
import inspect
import os
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slurmft.core.config import WORDS
from slurmft.core.config import options as config_options
from slurmft.core.errors import UsageError, one_line, unknown
from slurmft.train.recipes import TASKS, TaskFacts

GROUP = "slurmft.tasks"


@functools.cache
def load(name: str) -> Any:
    """The class that --task names; UsageError where it cannot be imported, or is no whole task."""
    what = f"--task {name}"
    try:
        found = _imported(name)
    except UsageError:
        raise
    except Exception as error:  # whatever the module does when it is imported
        raise UsageError(
            f"{what} cannot be imported: {one_line(error)}",
            "give package.module:Class as Python imports it from this folder",
        ) from error
    from slurmft.train.tasks import Task

    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise UsageError(
            f"{what} is no subclass of slurmft.train.tasks.Task", "derive it from that"
        )
    if lacking := sorted(found.__abstractmethods__):
        raise UsageError(f"{what} lacks {', '.join(f'{m}()' for m in lacking)}", "write it")
    if not isinstance(getattr(found, "facts", None), TaskFacts):
        raise UsageError(
            f"{what} lacks facts, which say what its rows are",
            "facts = TaskFacts(...), with slurmft.train.tasks.TaskFacts",
        )
    return found


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if attribute:
        if os.getcwd() not in sys.path:  # as `python -m` does, and console scripts do not
            sys.path.insert(0, os.getcwd())
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    known = {each.name: each for each in entry_points(group=GROUP)}
    if name not in known:
        raise unknown("--task", name, [*TASKS, *known, "package.module:Class"])
    return known[name].load()


def code(name: str) -> str:
    """The folder that the module of an own task is imported from; "" of a built-in one, and of one
    that is installed."""
    if name in TASKS:
        return ""
    cls = load(name)
    folder = Path(inspect.getfile(cls)).resolve().parents[cls.__module__.count(".")]
    installed = (sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    return "" if folder in map(Path, map(os.path.realpath, installed)) else str(folder)


def use_code(folder: str) -> None:
    """Lets own modules be imported from a folder first."""
    if folder:
        sys.path[:0] = [folder, os.getcwd()]  # so that `load` does not put this one first


def options(kind: Any, task: str, given: tuple[str, ...]) -> Any:
    """The own options of a task, a dataclass that its attribute `Options` is; None: it has none.
    UsageError where NAME=VALUE of --task-option is none of them, or of another type."""
    own = getattr(kind, "Options", None)
    fields = config_options(own) if own else {}
    values: dict[str, Any] = {}
    for word in given:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in fields or not equals:
            known = ", ".join(f"{n}={f.default}" for n, f in fields.items()) or "none"
            raise UsageError(
                f"--task-option {word!r}: no option of --task {task}", f"it has {known}"
            )
        values[name] = _value(word, text, type(fields[name].default))
    return own(**values) if own else None


def _value(word: str, text: str, kind: type) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        words = WORDS.get(kind, kind.__name__)
        raise UsageError(f"--task-option {word!r} must be {words}") from None
