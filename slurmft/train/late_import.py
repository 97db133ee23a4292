"""Leaves out of transformers' import what a fine-tuning of texts does not use."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def on_first_call(name: str) -> Iterator[None]:
    """What the block imports from a module are functions that import it when they are called.

    After the block the module can be imported as always. One that is there already is used.
    """

    def late(function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(name), function)(*args, **kwargs)

        return call

    stand_in = ModuleType(name)
    vars(stand_in)["__getattr__"] = late
    found = sys.modules.setdefault(name, stand_in)
    try:
        yield
    finally:
        if found is stand_in:
            del sys.modules[name]


with contextlib.suppress(ImportError), on_first_call("scipy.optimize"):
    # For one function, in losses of object detection: a tenth of the time of all imports.
    import transformers.loss.loss_utils  # noqa: F401
