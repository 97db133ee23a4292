"""The environment of a user's own program on a node: `--env`, `--accelerate-config`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import interpreter, process
from slurmft.core.errors import UsageError
from slurmft.node import copies
from slurmft.programs.description import OwnProgram


def command_in(
    own: OwnProgram, command: list[str], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns a command of the program and its variables, in the program's environment: in the copy
    on this node's own disk, if there is one."""
    # Empty without --stage-env.
    copy_of = copies.of(variables)
    executable, *arguments = command
    # The longest path first: an environment may lie in a folder that is copied, too.
    for shared in sorted(copy_of, key=len, reverse=True):
        if executable.startswith(f"{shared}/"):
            executable = copy_of[shared] + executable.removeprefix(shared)
            break
    inside = dict(variables)
    if own.env:
        env = copy_of.get(own.env, own.env)
        # They are of slurmft's own environment, which the job has inherited.
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"):
            inside.pop(name, None)
        prefix = "VIRTUAL_ENV"
        if Path(env, "conda-meta").is_dir():
            prefix = "CONDA_PREFIX"
        inside[prefix] = env
        # In front, as `activate` does: the program may call commands of its environment.
        inside["PATH"] = f"{env}/bin:{inside.get('PATH', os.defpath)}"
    return [executable, *arguments], inside


def accelerate_variables(
    own: OwnProgram, variables: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that Accelerate makes of --accelerate-config, on this node and in the
    program's environment.

    Raises:
        UsageError: Accelerate refuses the file.
    """
    script = str(Path(__file__).with_name("accelerate_variables.py"))
    command, inside = command_in(
        own,
        interpreter.foreign_script(own.python, script, str(own.accelerate_config)),
        variables,
    )
    done = process.run(
        command,
        None,
        cwd=own.folder,
        env=interpreter.library_environment(inside),
    )
    answer: dict[str, Any] = {"error": "its Python ends with an error"}
    _, brace, last_object = done.stdout.rpartition("\n{")  # libraries may print, too
    if brace:
        answer = json.loads("{" + last_object)
    if "error" in answer:
        raise UsageError(
            f"--accelerate-config {own.accelerate_config!r}: {answer['error']}",
            "mend the file, or what it needs; then submit again",
        )
    return {str(name): str(value) for name, value in answer["variables"].items()}
