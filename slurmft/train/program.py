"""What the kernel asks of a training."""

import math
from pathlib import Path
from typing import TypedDict

from slurmft.core.decode import decode
from slurmft.core.files import open_regular, parse_json
from slurmft.core.program import Gradient, ProgramKind
from slurmft.node import hardware

_MOST_HEADER_BYTES = 100_000_000
"""Size of the largest header of a file of safetensors; that format has the same limit."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Training(ProgramKind):
    """The built-in program."""

    sums_gradients = True

    def gradient(self) -> Gradient:
        # Here: of all that know this class, only nodes with oneCCL's binding ask.
        from slurmft.train.config import TrainConfig, local_steps, rounding

        config = TrainConfig.of(self.program)
        precision = config.precision
        if precision == "auto" and hardware.computes_bf16():
            precision = "bf16"
        sent_as = "fp32"  # local SGD sends weights
        if local_steps(config.grad_comm) is None:
            sent_as = rounding(config.grad_comm, precision)
        numbers = None
        if config.model:
            numbers = weights_of(config.model, config.lora)
        if numbers is None:
            numbers = super().gradient().numbers
        return Gradient(numbers=numbers, dtype=_DTYPES[sent_as])


def weights_of(model: str, lora: int | None = None) -> int | None:
    """Counts the weights of a model that are trained, as its files of safetensors say; None where
    they are not on this machine.

    Args:
        lora: rank of adapters, which train in place of the model.
    """
    from slurmft.train.login.model_files import folders_of

    for folder in reversed(folders_of(model)):
        count = 0
        for file in folder.glob("*.safetensors"):
            for shape in _shapes(file):
                is_matrix = len(shape) == 2
                if lora is None:
                    count += math.prod(shape)
                elif is_matrix:
                    count += lora * sum(shape)
        if count:
            return count
    return None


class _Tensor(TypedDict):
    shape: list[int]


def _shapes(file: Path) -> list[list[int]]:
    """Returns the shapes of the tensors of a file of safetensors; none of a damaged one."""
    try:
        with open_regular(file) as opened:
            # The size of the header, then the header.
            size = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(min(size, _MOST_HEADER_BYTES)))
        if isinstance(header, dict):
            header.pop("__metadata__", None)
        tensors = decode(header, dict[str, _Tensor])
    # Whoever loads the weights says what is wrong with them.
    except (OSError, ValueError):
        return []
    return [tensor["shape"] for tensor in tensors.values()]
