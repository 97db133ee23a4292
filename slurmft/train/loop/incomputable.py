"""What a model cannot compute: torch's errors for it name neither an option nor a cure."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from slurmft.core.errors import UsageError, one_line

_NO_DTYPE = re.compile(
    r"Unsupported dtype (BFloat16|Half)"
    r"|not implemented for '(BFloat16|Half)'"
    r"|only supports dimensions .* half precision"
    r"|cannot be converted to type c10::(BFloat16|Half) without overflow"
)
"""What torch says where an operation has no code for numbers of 16 bits, as Fourier transforms on
GPUs; the third of sizes that are no power of two, the last where a model masks with the least
number of 32 bits, as DeBERTa."""
_NO_GRADIENT = "does not require grad and does not have a grad_fn"


@contextlib.contextmanager
def in_precision(precision: str, model: Any) -> Iterator[None]:
    """Raises UsageError where a model has an operation that cannot compute in a precision."""
    try:
        yield
    except RuntimeError as error:
        if precision == "fp32" or not _NO_DTYPE.search(str(error)):
            raise
        raise UsageError(
            f"{type(model).__name__} cannot be computed in {precision} on this device: "
            f"{one_line(error)}",
            "use --precision fp32",
        ) from error


@contextlib.contextmanager
def in_backward(model: Any) -> Iterator[None]:
    """Raises UsageError where the loss depends on no weight that is trained."""
    try:
        yield
    except RuntimeError as error:
        if _NO_GRADIENT not in str(error):
            raise
        raise UsageError(
            f"the loss does not depend on any of the weights of {type(model).__name__} that are "
            "trained",
            "train others, by --lora-targets or --freeze: the model does not compute with these "
            "for such data (LED uses query_global, key_global and value_global for global "
            "attention alone)",
        ) from error
