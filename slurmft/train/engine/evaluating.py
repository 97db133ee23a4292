"""A model that is evaluated, or tried out, and is trained afterwards as if it had not been."""

import contextlib
from collections.abc import Iterator
from typing import Any

_SIMPLE = (bool, int, float, str, type(None))
"""Types of what modules note in evaluation mode, as NLLB-MoE's routers their capacity."""


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Has a model in evaluation mode for the block: without dropout, outputs can be compared.

    Afterwards all modules have their modes and their other simple attributes as before. Some models
    compute otherwise for good once they have been evaluated: an attempt that begins after an
    evaluation would not train as one that goes on.
    """
    before = [(module, _simple_attributes(module)) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, attributes in before:
            # By `vars`: modules look at each attribute that is set.
            vars(module).update(attributes)


def _simple_attributes(module: Any) -> dict[str, Any]:
    values = {}
    for name, value in vars(module).items():
        if isinstance(value, _SIMPLE):
            values[name] = value
    return values
