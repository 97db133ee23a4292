"""The GPUs of a rank, of any vendor, as torch has them: ROCm's are "cuda", Intel's "xpu"."""

import os
import warnings

import torch

from slurmft.core.text import shown
from slurmft.node.hardware import cpu_model
from slurmft.node.profiles import GPUS

_BUILDS = {
    "NVIDIA": ("CUDA", "cuda"),
    "AMD": ("ROCm", "hip"),
    "Intel": ("XPU support", "xpu"),
}
"""Vendor -> the build of torch that its GPUs need, and the name of it in `torch.version`."""


def usable() -> tuple[int, str | None]:
    """Counts the GPUs that torch can use here.

    Where the ranks are to compute on CPUs, nothing is asked of a driver.

    Returns:
        How many there are; and why not enough, if the node's task has seen more.
    """
    gpus_of_task = os.environ.get(GPUS, "")  # "4 NVIDIA"; "0": they are not to be used
    count_of_task, _, vendor = gpus_of_task.partition(" ")
    if count_of_task == "0":
        return 0, None
    count = 0
    # torch only warns where a driver is too old, and then counts no GPU: the warning says why.
    with warnings.catch_warnings(record=True) as driver_warnings:
        warnings.simplefilter("always")
        if torch.accelerator.is_available():
            count = torch.accelerator.device_count()
    # One may be this rank's own, see `uuid`: the other ranks see the others.
    if not count_of_task or count in (1, int(count_of_task)):
        return count, None
    build, attribute = _BUILDS[vendor]
    torch_version = f"torch {torch.__version__}"
    gpus = f"{count_of_task} {vendor} GPU(s)"
    if getattr(torch.version, attribute) is None:
        return 0, f"{torch_version} has no {build}, and the host has {gpus}"
    reason = ""
    if driver_warnings:
        first_warning = str(driver_warnings[0].message)
        reason = f": {shown(first_warning, 160)}"
    return count, f"{torch_version} can use {count} of the host's {gpus}{reason}"


def kind() -> torch.device:
    """Returns the kind of device that torch can use, without an index."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def uuid() -> str:
    """Returns what tells the only GPU that this rank sees from those of others."""
    module = torch.get_device_module(kind())
    return str(module.get_device_properties(0).uuid)


def take(local_rank: int) -> torch.device:
    """Makes a GPU this rank's current device: the only one that it sees, or the one of its number.
    `backend.choose` has made sure that it has one of its own."""
    index = local_rank
    if torch.accelerator.device_count() == 1:
        index = 0
    device = torch.device(kind().type, index)
    torch.get_device_module(device).set_device(device)
    # For every new shape cuDNN's attention builds a plan, on Hopper for tens to hundreds of ms;
    # batches have tens of shapes. Flash attention needs no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def name_of(device: torch.device) -> str:
    """Returns the model of a GPU, or of the CPU."""
    if device.type == "cpu":
        return cpu_model()
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))
