"""The GPUs of a rank, of any vendor, as torch has them: ROCm's are "cuda", Intel's "xpu"."""

import os
import warnings

import torch

from slurmft.core.text import shown
from slurmft.node.hardware import cpu_model
from slurmft.node.profiles import GPUS

_BUILDS = {"NVIDIA": ("CUDA", "cuda"), "AMD": ("ROCm", "hip"), "Intel": ("XPU support", "xpu")}
"""What torch is built with for a vendor's GPUs, and under which name `torch.version` has it."""


def usable() -> tuple[int, str | None]:
    """How many GPUs torch can use here; and why not enough, if the node's task has found some.

    Where the ranks are to compute on CPUs, nothing is asked of a driver.
    """
    number, _, vendor = os.environ.get(GPUS, "").partition(" ")
    if number == "0":
        return 0, None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not number or count in (1, int(number)):  # 1: this rank's own, perhaps; see `uuid`
        return count, None
    name, build = _BUILDS[vendor]
    torch_is, there = f"torch {torch.__version__}", f"{number} {vendor} GPU(s)"
    if getattr(torch.version, build) is None:
        return 0, f"{torch_is} has no {name}, and the host has {there}"
    why = f": {shown(str(said[0].message), 160)}" if said else ""
    return count, f"{torch_is} can use {count} of the host's {there}{why}"


def kind() -> torch.device:
    """The kind of device that torch can use, without an index."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def uuid() -> str:
    """Tells the only GPU that this rank sees from those of others."""
    return str(torch.get_device_module(kind()).get_device_properties(0).uuid)


def take(local_rank: int) -> torch.device:
    """Makes a GPU this rank's current device: the only one that it sees, or the one of its number.
    `backend.choose` has made sure that it has one of its own."""
    device = torch.device(kind().type, 0 if torch.accelerator.device_count() == 1 else local_rank)
    torch.get_device_module(device).set_device(device)
    # For every new shape cuDNN's attention builds a plan, on Hopper for tens to hundreds of ms;
    # batches have tens of shapes. Flash attention needs no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def name_of(device: torch.device) -> str:
    """What computes: the model of a GPU, or of the CPU."""
    if device.type == "cpu":
        return cpu_model()
    return str(torch.get_device_module(device).get_device_name(device))
