"""oneCCL's PyTorch binding: detection, check and environment, without importing torch.

The last upstream release is for torch 2.8; sites that pin that have wheels or builds of their own.
"""

import functools
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core import interpreter, process, removal
from slurmft.core.errors import UsageError

MODULE = "oneccl_bindings_for_pytorch"
"""Importing it registers the backend."""
LAST_TORCH = "2.8"
"""The torch that its last release is for."""
MARK = "ccl"
"""File in the folder of a node's task: its ranks may use oneCCL."""
# How long ranks take to end when they are killed.
_END_S = 2.0
NETWORK_VARIABLES = {"FI_PROVIDER": "^shm,sm2"}
"""Variables for runs on several nodes. Where libfabric finds no fabric, as without libibverbs, it
may take shared memory for the network; nodes then wait for each other for ever. Intel MPI has
shared memory of its own."""
WHEELS = "https://pytorch-extension.intel.com/release-whl/stable/cpu/us/"
"""Intel's index of wheels, which has it."""
# Variables that a shell itself sets or changes.
_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "PYTHONPATH", "COLUMNS", "LINES")
# Prints what another Python finds, without slurmft, which it may lack.
_FIND = f"""
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

def version_of(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None

spec = find_spec({MODULE!r})
answer = {{"origin": spec and spec.origin, "torch": version_of("torch")}}
answer["version"] = version_of("oneccl_bind_pt")
print(json.dumps(answer))
"""
# A Python on a file system that is slow takes so long at most.
_FIND_S = 60
_SETVARS_S = 30
# Sources a script, and prints the variables. Arguments left in place would be the script's.
_SOURCE = 'script=$1; shift; source "$script" >/dev/null 2>&1; env -0'


@dataclass(frozen=True, slots=True)
class Binding:
    """The installed binding."""

    version: str | None
    torch: str
    origin: str
    """File of its module."""

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
        script = Path(self.origin).parent / "env" / "setvars.sh"
        if not script.is_file():
            return {}
        # The script must not be $0: it would take that for being run, not sourced, and refuse.
        command = ["bash", "-c", _SOURCE, "bash", str(script)]
        done = process.run(command, _SETVARS_S)
        changed = {}
        # NUL between them, by `env -0`: a value may hold line breaks.
        for entry in done.stdout.split("\0"):
            name, equals, value = entry.partition("=")
            before = os.environ.get(name)
            is_extended = (before or "") in value
            if equals and name not in _SHELL and value != before and is_extended:
                changed[name] = value
        return changed


def _minor(text: str) -> list[str]:
    return re.findall(r"\d+", text)[:2]  # "2.9.0a0+git" has 2 and 9


def find(python: str = interpreter.PYTHON) -> Binding | None:
    """Finds the binding that is installed for a Python, if any, without importing it."""
    if python != interpreter.PYTHON:
        return _find_elsewhere(python)
    from importlib.util import find_spec

    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    torch = _version("torch") or "unknown"
    return Binding(_version("oneccl_bind_pt"), torch, spec.origin)


def _find_elsewhere(python: str) -> Binding | None:
    """Finds the binding of another Python."""
    answer = _look_elsewhere(python)
    if answer.get("origin") is None:
        return None
    torch = answer["torch"] or "unknown"
    return Binding(answer["version"], torch, answer["origin"])


@functools.cache
def _look_elsewhere(python: str) -> dict[str, Any]:
    """Returns what another Python says of its binding and its torch; nothing where it cannot be
    started."""
    command = interpreter.foreign_code(python, _FIND)
    environment = interpreter.library_environment(dict(os.environ))
    printed = process.output(command, _FIND_S, env=environment) or ""
    # What the Python imports at its start may print, too: the answer is the last line.
    last_line = printed.rstrip().rpartition("\n")[2]
    try:
        answer: dict[str, Any] = json.loads(last_line)
    except ValueError:
        return {}
    return answer


def _torch_of(python: str) -> str | None:
    """Returns the version of a Python's torch; None: it has none."""
    if python == interpreter.PYTHON:
        return _version("torch")
    torch: str | None = _look_elsewhere(python).get("torch")
    return torch


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check(backend: str, python: str, where: str = "") -> None:
    """Raises UsageError where a Python of this machine cannot use oneCCL, and is asked to.

    Args:
        python: that of the program, whose packages count.
        where: the host, for the message.
    """
    if backend != "ccl":
        return
    problem = problem_of(find(python))
    if problem is not None:
        raise UsageError(f"--backend ccl{where}: {problem}", hint(python))


def problem_of(binding: Binding | None) -> str | None:
    """Returns why the binding cannot be used, as far as its files tell; None: it can."""
    if binding is None:
        return f"{MODULE} is not installed"
    return binding.mismatch


def hint(python: str = interpreter.PYTHON) -> str:
    """Returns what to do where a Python cannot use oneCCL."""
    torch = _minor(_torch_of(python) or LAST_TORCH)
    # As numbers: 2.10 is newer than 2.8.
    if [int(n) for n in torch] > [int(n) for n in LAST_TORCH.split(".")]:
        return (
            f"use --backend gloo: the last release of oneccl_bind_pt is for torch {LAST_TORCH}, "
            f"and this is torch {'.'.join(torch)}"
        )
    return (
        f"install oneccl_bind_pt=={'.'.join(torch)}.* from Intel's index of wheels "
        f"({WHEELS}), or use --backend gloo"
    )


def interface_variables(interface: str) -> dict[str, str]:
    """Returns the variables that bind oneCCL to a network interface: its libfabric may take
    loopback, and wait for ever."""
    return {"FI_TCP_IFACE": interface, "CCL_KVS_IFACE": interface}


def remove_shared_memory(pids: Iterable[int], place: Path) -> None:
    """Removes the memory that this user's processes shared by libfabric, and did not remove.

    Its provider `shm` leaves a file of 64 MiB, PID:UID:NUMBER, of each process that ends while its
    communicators live, also where it succeeds.

    Args:
        pids: processes that have ended, or are about to.
        place: folder of the shared memory.
    """
    deadline = time.monotonic() + _END_S
    ended = []
    for pid in pids:
        while _is_alive(pid) and time.monotonic() < deadline:
            time.sleep(_END_S / 40)
        # Another process may have the number by now.
        if not _is_alive(pid):
            ended.append(str(pid))
    form = re.compile(rf"({'|'.join(ended)}):{os.getuid()}:.*")
    removal.sweep(place, form)


def _is_alive(pid: int) -> bool:
    fields = process.stat(pid)
    return fields is not None and fields[0] != "Z"


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which oneCCL knows a rank's local place without mpirun."""
    names = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    variables = {}
    for ours, theirs in names.items():
        if theirs in environment:  # a rank that is started by hand has none of them
            variables[ours] = environment[theirs]
    return variables
