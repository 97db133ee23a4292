"""oneCCL's PyTorch binding: detection, check and environment, without importing torch.

The last upstream release is for torch 2.8; sites that pin that have wheels or builds of their own.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmft.core.errors import UsageError
from slurmft.node.hardware import host_name

MODULE = "oneccl_bindings_for_pytorch"
"""Importing it registers the backend."""
# The torch that its last release is for.
_LAST_TORCH = "2.8"
NETWORK_VARIABLES = {"FI_PROVIDER": "^shm,sm2"}
"""Variables for runs on several nodes. Where libfabric finds no fabric, as without libibverbs, it
may take shared memory for the network; nodes then wait for each other for ever. Intel MPI has
shared memory of its own."""
# Variables that a shell itself sets or changes.
_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "PYTHONPATH", "COLUMNS", "LINES")
# Sources a script, and prints the variables. Arguments left in place would be the script's.
_SOURCE = 'script=$1; shift; source "$script" >/dev/null 2>&1; env -0'


@dataclass(frozen=True, slots=True)
class Binding:
    """The installed binding."""

    version: str | None
    torch: str

    @property
    def mismatch(self) -> str | None:
        """The reason why it does not match torch. None: it does, or its version is unknown."""
        if self.version is None or _minor(self.version) == _minor(self.torch):
            return None
        return f"{MODULE} {self.version} was built for another torch than {self.torch}"

    def environment(self) -> dict[str, str]:
        """Returns the variables that its `setvars.sh` sets: the loader reads them before Python
        runs, so processes must be started with them. Empty where the binding has no such script.

        Of variables that are set already, only lists that the script extends are returned:
        mpirun's own I_MPI_ROOT must not be replaced by that of a library in the binding.
        """
        origin = _origin()
        assert origin is not None  # a binding without a file would not have been found
        script = Path(origin).parent / "env" / "setvars.sh"
        if not script.is_file():
            return {}
        # The script must not be $0: it would take that for being run, not sourced, and refuse.
        command = ["bash", "-c", _SOURCE, "bash", str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        )
        changed = {}
        for entry in done.stdout.split("\0"):
            name, equals, value = entry.partition("=")
            before = os.environ.get(name)
            is_extended = (before or "") in value
            if equals and name not in _SHELL and value != before and is_extended:
                changed[name] = value
        return changed


def _minor(text: str) -> list[str]:
    return re.findall(r"\d+", text)[:2]  # "2.9.0a0+git" has 2 and 9


def find() -> Binding | None:
    """Finds the installed binding, if any."""
    if _origin() is None:
        return None
    return Binding(_version("oneccl_bind_pt"), _version("torch") or "unknown")


def _origin() -> str | None:
    """Returns the binding's file, without importing it; None: it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(MODULE)
    if spec is None:
        return None
    return spec.origin


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def choose(backend: str, has_gpu: bool) -> Binding | None:
    """Returns the binding if this node is to be prepared for oneCCL. With "auto", GPUs come first.

    The ranks agree on the collectives that a run uses (`slurmft.job.backend`): another node may
    lack the binding.

    Raises:
        UsageError: ccl was requested, and cannot be used.
    """
    if backend not in ("auto", "ccl") or (backend == "auto" and has_gpu):
        return None
    binding = find()
    problem = problem_of(binding)
    if problem is None:
        return binding
    if backend == "ccl":
        raise UsageError(f"--backend ccl on {host_name()}: {problem}", hint())
    return None


def problem_of(binding: Binding | None) -> str | None:
    """Returns why the binding cannot be used, as far as its files tell; None: it can."""
    if binding is None:
        return f"{MODULE} is not installed"
    return binding.mismatch


def hint() -> str:
    torch = _minor(_version("torch") or _LAST_TORCH)
    if [int(n) for n in torch] > [int(n) for n in _LAST_TORCH.split(".")]:
        return (
            f"use --backend gloo: the last release of oneccl_bind_pt is for torch {_LAST_TORCH}, "
            f"and this is torch {'.'.join(torch)}"
        )
    return (
        f"install oneccl_bind_pt=={'.'.join(torch)}.* from Intel's index of wheels "
        "(https://pytorch-extension.intel.com), or use --backend gloo"
    )


def interface_variables(interface: str) -> dict[str, str]:
    """Returns the variables that bind oneCCL to a network interface: its libfabric may take
    loopback, and wait for ever."""
    return {"FI_TCP_IFACE": interface, "CCL_KVS_IFACE": interface}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which oneCCL knows a rank's local place without mpirun."""
    names = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    variables = {}
    for ours, theirs in names.items():
        if theirs in environment:  # a rank that is started by hand has none of them
            variables[ours] = environment[theirs]
    return variables
