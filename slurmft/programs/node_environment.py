"""The environment of a user's own program on a node: `--env`, `--accelerate-config`."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.node import copies
from slurmft.programs.description import OwnProgram


def command_in(
    own: OwnProgram, command: list[str], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """A command of the program and its variables, in its environment: the copy on this node's own
    disk, if there is one."""
    copy_of = copies.of(variables)
    found, env = dict(variables), own.env and copy_of.get(own.env, own.env)
    for shared in sorted(copy_of, key=len, reverse=True):
        if command[0].startswith(f"{shared}/"):
            command = [copy_of[shared] + command[0].removeprefix(shared), *command[1:]]
            break
    if env:
        for other in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"):
            found.pop(other, None)
        found["CONDA_PREFIX" if Path(env, "conda-meta").is_dir() else "VIRTUAL_ENV"] = env
        found["PATH"] = f"{env}/bin:{found.get('PATH', os.defpath)}"
    return command, found


def accelerate_variables(own: OwnProgram, variables: Mapping[str, str]) -> dict[str, str]:
    """What Accelerate makes of --accelerate-config, on this node and in the program's environment;
    UsageError where it refuses the file."""
    script = str(Path(__file__).with_name("accelerate_variables.py"))
    command, there = command_in(own, [own.python, script, str(own.accelerate_config)], variables)
    done = subprocess.run(command, cwd=own.folder, env=there, capture_output=True, text=True)
    last = done.stdout.rpartition("\n{")[2]  # libraries may print, too
    answer: dict[str, Any] = json.loads("{" + (last or '"error": "its Python ends with an error"}'))
    if error := answer.get("error"):
        what = f"--accelerate-config {own.accelerate_config!r}: {error}"
        raise UsageError(what, "mend the file, or what it needs; then submit again")
    return {str(k): str(v) for k, v in answer["variables"].items()}
