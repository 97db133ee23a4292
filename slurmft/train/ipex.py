"""Intel's extension for PyTorch (`--ipex`), for sites that have it: its project has ended."""

import importlib
from typing import Any

from slurmft.core.errors import UsageError

_PACKAGE = "intel-extension-for-pytorch"


def check_device(is_cpu: bool) -> None:
    """Raises UsageError where a run with the extension does not compute on CPUs."""
    if not is_cpu:
        hint = "leave --ipex out, or compute on CPUs: --profile cpu or xeon"
        raise UsageError("--ipex is for CPUs, and this run computes on GPUs", hint)


def check_package() -> None:
    """Raises UsageError where the extension is not installed, or not for this torch."""
    import importlib.metadata  # 20 ms, which every submission would pay

    # In the wheel there are neither constraints nor a folder to install from.
    hint = (
        "leave --ipex out; its last release needs torch 2.8, in an environment of its own: "
        "slurmft help sites"
    )
    try:
        release = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        problem = f"--ipex needs {_PACKAGE}, which is not installed"
        raise UsageError(problem, hint) from None
    torch = importlib.metadata.version("torch")
    # Importing it beside another torch would end the process.
    if release.split(".")[:2] != torch.split(".")[:2]:
        raise UsageError(f"--ipex: {_PACKAGE} {release} is not for torch {torch}", hint)


def optimize(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns model and optimizer with the extension's kernels. Weights keep type and layout, which
    checkpoints and fused layers share: autocast rounds copies."""
    extension = importlib.import_module(_PACKAGE.replace("-", "_"))
    model.train()
    settings = {"inplace": True, "weights_prepack": False, "fuse_update_step": False}
    return tuple(extension.optimize(model, optimizer=optimizer, **settings))
