"""What the kernel asks of a program of the user's own."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import interpreter
from slurmft.core.decode import decode_or_none
from slurmft.core.files import is_measurement, read_json
from slurmft.core.options import build
from slurmft.core.program import Program, ProgramKind
from slurmft.programs.description import OWN_FILES, OwnProgram, in_words


class OwnProgramKind(ProgramKind):
    """A program of the user's own: its checkpoints and its result are files that it writes."""

    # It may attach all the same (`slurmft.attach`): nothing relies on it.
    attaches = False

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._own = build(OwnProgram, program.settings)
        self.per = self._own.per
        # Whether it trains is not known, only that its processes are ranks.
        self.sums_gradients = self.per == "torchrun"

    @property
    def python(self) -> str:
        return self._own.python

    def check_python(self) -> None:
        if self._own.env is not None:
            # Here: commands that list runs need not wait for it.
            from slurmft.programs import environment

            environment.check_uv_environment(Path(self._own.env))

    def newest_checkpoint(self) -> str | None:
        checkpoint = self._own.newest_checkpoint()
        if checkpoint is None:
            return None
        return in_words(checkpoint)

    def checkpoint_place(self) -> str:
        folder = self._own.checkpoint_dir
        if not folder:
            return ""
        return f"--checkpoint-dir {folder!r}"

    def read_result(self) -> dict[str, Any]:
        if self._own.result_file is None:
            return {}
        owner = self._own.owner_of_result()
        if owner:
            raise LookupError(
                f"--result-file {self._own.result_file!r} belongs to {owner}: not taken"
            )
        path = self._own.result()
        # A file of an earlier run is not new, and counts as none.
        values: dict[str, Any] = {}
        if path is not None:
            values = read_json(path) or {}
        # Text and lists in it are the program's own business.
        metrics = {
            name: value for name, value in values.items() if is_measurement(value)
        }
        if not metrics:
            raise LookupError(
                f"--result-file {self._own.result_file!r}: no numbers were written there"
            )
        return metrics

    def node_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        if self._own.accelerate_config is None:
            return {}
        # Here: on the login node nobody asks for these.
        from slurmft.programs import node_environment

        return node_environment.accelerate_variables(self._own, variables)

    @staticmethod
    def varied(settings: dict[str, Any], cell: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the placeholders of its study, or else its arguments."""
        if cell is not None:
            return cell
        return arguments(settings)


def arguments(settings: dict[str, Any]) -> dict[str, str]:
    """Returns a program's command line by its options: {"command": "train.py data.csv",
    "--lr": "0.1"}, without those that name the run's own files."""
    # The configuration may be of any version, or damaged.
    argv = decode_or_none(settings.get("argv"), list[str]) or [""]
    argv = interpreter.with_folder(argv)
    # The interpreter is not what the program is: its script, or -m, is.
    if os.path.basename(argv[0]).startswith("python") and len(argv) > 1:
        argv = argv[1:]
    command_line = [os.path.basename(argv[0]), *argv[1:]]
    # A word may hold anything but a NUL: joined by it, they are split before each option.
    command, *flags = re.split(r"\0(?=--)", "\0".join(command_line))
    by_name = {"command": command}
    for text in flags:
        # --lr=0.1 and --lr 0.1 are the same option.
        name, *rest = re.split("[=\0]", text, maxsplit=1)
        by_name[name] = " ".join(rest)
    # Every run has its own: they tell nothing of what differs between runs.
    files_of_run = [settings.get(key) for key in OWN_FILES]
    values = {}
    for name, value in by_name.items():
        if value not in files_of_run:
            values[name] = value.replace("\0", " ")
    return values
