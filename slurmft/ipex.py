"""Intel's extension for PyTorch (`--ipex`), for sites that pin it.

It has ended upstream with torch 2.8. Measured there its bf16 step was no faster than PyTorch's own,
which uses AMX by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from typing import Any

from slurmft.errors import UsageError

_MODULE, _PACKAGE = "intel_extension_for_pytorch", "intel-extension-for-pytorch"


def optimize(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Model and optimizer with the extension's kernels; weights stay in fp32, as checkpoints and
    Accelerate's autocast want them.

    Raises:
        UsageError: it is not installed, or for another torch.
    """
    import torch

    torch_minor = ".".join(torch.__version__.split(".")[:2])
    hint = "pip install '.[xeon]' in slurmft's sources, for an environment of its own, or no --ipex"
    if importlib.util.find_spec(_MODULE) is None:
        raise UsageError(f"--ipex needs {_PACKAGE}, which is not installed", hint)
    if not version(_PACKAGE).startswith(f"{torch_minor}."):  # importing it would end the process
        raise UsageError(
            f"--ipex: {_PACKAGE} {version(_PACKAGE)} is for another torch than {torch.__version__}",
            hint,
        )
    extension = importlib.import_module(_MODULE)
    model.train()
    found: tuple[Any, Any] = extension.optimize(
        model, optimizer=optimizer, dtype=torch.float32, inplace=True, weights_prepack=False
    )
    return found


def in_use() -> str | None:
    """The extension's version where torch calls its kernels in this process, else None.

    Neither that it is installed nor that it was asked for says so: the dispatcher does. PyTorch has
    no kernel of its own for a layer norm on CPUs, only a formula of other operators.
    """
    import torch

    extension = sys.modules.get(_MODULE)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::layer_norm", "CPU")
    return str(extension.__version__) if extension and has_kernel else None
