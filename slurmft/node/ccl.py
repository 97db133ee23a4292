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
_LAST_TORCH = "2.8"
"""That of the last release."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The installed binding."""

    version: str | None
    torch: str

    @property
    def mismatch(self) -> str | None:
        """Why it does not match torch; None: it does, or its torch version is unknown."""
        if self.version is None or _minor(self.version) == _minor(self.torch):
            return None
        return f"{MODULE} {self.version} was built for another torch than {self.torch}"

    def environment(self) -> dict[str, str]:
        """The variables that its `setvars.sh` sets: the loader reads them before Python runs, so
        processes must be started with them. Empty where the binding has no such script.

        Of variables that are set already, only lists that the script extends: mpirun's own
        I_MPI_ROOT must not be replaced by that of a library in the binding.
        """
        origin = _origin()
        assert origin is not None  # what is no file is no binding
        script = Path(origin).parent / "env" / "setvars.sh"
        if not script.is_file():
            return {}
        # As $0, its own name would make it refuse: it takes that for being run, not sourced. What
        # it is sourced with, if not shifted away, would be its arguments.
        sourced = 'script=$1; shift; source "$script" >/dev/null 2>&1; env -0'
        command = ["bash", "-c", sourced, "bash", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        pairs = (entry.partition("=") for entry in done.stdout.split("\0") if "=" in entry)
        found = {name: value for name, _, value in pairs if value != os.environ.get(name)}
        return {k: v for k, v in found.items() if k not in _SHELL and os.environ.get(k, "") in v}


_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "PYTHONPATH", "COLUMNS", "LINES")


def _minor(text: str) -> list[str]:
    return re.findall(r"\d+", text)[:2]  # "2.9.0a0+git" has 2 and 9


def find() -> Binding | None:
    """The binding that is installed, if any."""
    if _origin() is None:
        return None
    return Binding(_version("oneccl_bind_pt"), _version("torch") or "unknown")


def _origin() -> str | None:
    """The binding's file, without importing it; None: it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(MODULE)
    return None if spec is None else spec.origin


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def choose(backend: str, has_gpu: bool) -> Binding | None:
    """The binding, if this node is prepared for oneCCL; for auto, GPUs come first. Which
    collectives a run uses, its ranks agree on (`slurmft.job.backend`): another node may lack it.
    UsageError where ccl was requested, and cannot be used."""
    if backend not in ("auto", "ccl") or (backend == "auto" and has_gpu):
        return None
    found = find()
    problem = problem_of(found)
    if problem and backend == "ccl":
        raise UsageError(f"--backend ccl on {host_name()}: {problem}", hint())
    return None if problem else found


def problem_of(found: Binding | None) -> str | None:
    """Why the binding cannot be used, as far as its files tell; None: it can."""
    return f"{MODULE} is not installed" if found is None else found.mismatch


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


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which oneCCL knows a rank's local place without mpirun."""
    names = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    return {ours: environment[theirs] for ours, theirs in names.items() if theirs in environment}
